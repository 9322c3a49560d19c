// SPDX-License-Identifier: BSL-1.0
#pragma once
// The way of training together that the flags name. It is made of many types, so it is compiled once for each backend,
// in a translation unit of its own: threads_synchroniser.cpp, mpi_synchroniser.cpp, tcp_synchroniser.cpp.

#include <memory>

#include "ops_cpu.hpp"
#include "options.hpp"
#include "parameters.hpp"
#include "synchroniser.hpp"

namespace gradsync_train {

/// For a model with these parameters, which it binds, and units. `observer`, if any, is told what happens. Collective.
template <class Backend, class Ops = CpuOps>
std::unique_ptr<Synchroniser> make_synchroniser(Backend comm, const Options& o, Parameters& parameters, const Units& units,
                                                gs::Observer* observer = nullptr, Ops ops = {});

}  // namespace gradsync_train
