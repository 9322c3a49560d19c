// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/nccl.hpp>

#include "fake_kernels.hpp"
#include "run.hpp"

template gradsync_test::Trained gradsync_test::run_rank<gradsync_test::FakeKernels>(gradsync::NcclBackend, const DrawnTraining&,
                                                                                    const Leg&);
