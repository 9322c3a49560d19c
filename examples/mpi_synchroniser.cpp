// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/mpi.hpp>  // first: it includes mpi.h without the C++ bindings

#include "chosen_synchroniser.hpp"

namespace gradsync_train {

template std::unique_ptr<Synchroniser> make_synchroniser(gs::MpiBackend, const Options&, Parameters&, const Units&, gs::Observer*, CpuOps);

}  // namespace gradsync_train
