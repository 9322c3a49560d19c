// SPDX-License-Identifier: BSL-1.0
#pragma once

/// The parts that gradsync::compiled holds for programs over TCP, in addition to the definitions of GRADSYNC_ONCE. Included by
/// backend/tcp.hpp, if GRADSYNC_COMPILED is defined.

#include "backend/tcp.hpp"
#include "compiled.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

GRADSYNC_EXTERN template class NumberedWork<collective::Engine>;
GRADSYNC_EXTERN template class EngineCollectives<TcpBackend, collective::Engine>;
GRADSYNC_EXTERN template class ProcessBackend<TcpBackend>;

}  // namespace detail

GRADSYNC_EXTERN_ENGINE(TcpBackend)

}  // namespace gradsync::inline v0_2
