// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>

#include "fake_kernels.hpp"
#include "run.hpp"

template gradsync_test::Trained gradsync_test::run_rank<gradsync_test::FakeKernels>(gradsync::StagingBackend<gradsync::ThreadBackend>,
                                                                                    const DrawnTraining&, const Leg&);
