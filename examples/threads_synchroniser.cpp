// SPDX-License-Identifier: BSL-1.0
#include <gradsync/gradsync.hpp>

#include "chosen_synchroniser.hpp"

namespace gradsync_train {

template std::unique_ptr<Synchroniser> make_synchroniser(gs::ThreadBackend, const Options&, Parameters&, const Units&, gs::Observer*,
                                                         CpuOps);

}  // namespace gradsync_train
