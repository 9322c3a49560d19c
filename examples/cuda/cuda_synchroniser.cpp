// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/gradsync.hpp>

#include "../chosen_synchroniser.hpp"
#include "adamw.hpp"

namespace gradsync_train {

template std::unique_ptr<Synchroniser> make_synchroniser(gs::NcclBackend, const Options&, Parameters&, const Units&, gs::Observer*,
                                                         CudaOps);
template std::unique_ptr<Synchroniser> make_synchroniser(gs::StagingBackend<gs::ThreadBackend>, const Options&, Parameters&, const Units&,
                                                         gs::Observer*, CudaOps);

}  // namespace gradsync_train
