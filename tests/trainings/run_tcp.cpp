// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/tcp.hpp>

#include "run.hpp"

template gradsync_test::Trained gradsync_test::run_rank(gradsync::TcpBackend, const DrawnTraining&, const Leg&);
