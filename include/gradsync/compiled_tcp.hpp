// SPDX-License-Identifier: BSL-1.0
#pragma once

/// The parts that gradsync::compiled holds for programs over TCP, in addition to the definitions of GRADSYNC_ONCE. Included by
/// backend/tcp.hpp, if GRADSYNC_COMPILED is defined.

#include "backend/tcp.hpp"
#include "compiled.hpp"

namespace gradsync::inline v0_2 {

GRADSYNC_EXTERN template class detail::NumberedWork<collective::Engine>;
GRADSYNC_EXTERN template class detail::EngineCollectives<TcpBackend, collective::Engine>;
GRADSYNC_EXTERN template class detail::ProcessBackend<TcpBackend>;
GRADSYNC_EXTERN_ENGINE(TcpBackend)

}  // namespace gradsync::inline v0_2
