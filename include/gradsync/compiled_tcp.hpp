// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// The instantiations that gradsync::compiled holds for programs over TCP, in addition to the definitions of
/// GRADSYNC_ONCE. backend/tcp.hpp includes this header if GRADSYNC_COMPILED is defined.

#include "backend/tcp.hpp"
#include "compiled.hpp"

/// @cond explicit_instantiations
namespace gradsync::inline v0_2 {

GRADSYNC_EXTERN template class detail::NumberedWork<collective::Engine>;
GRADSYNC_EXTERN template class detail::EngineCollectives<TcpBackend, collective::Engine>;
GRADSYNC_EXTERN template class detail::ProcessBackend<TcpBackend>;
GRADSYNC_EXTERN_ENGINE(TcpBackend)

}  // namespace gradsync::inline v0_2
/// @endcond
