// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "support/loopback_transport.hpp"

namespace gradsync_fuzz {

/// The other ranks take at once what this one sends; after a message that is too large they are lost, as over TCP. So nothing waits for
/// them, and each world goes soon: otherwise every run would poll all worlds that are left.
class AttentiveTransport final : public gradsync_test::LoopbackTransport {
public:
    using LoopbackTransport::LoopbackTransport;

    Ticket send(int, int, const void*, std::size_t, bool) override { return taken; }
    bool finish(Ticket ticket) override { return ticket == taken || LoopbackTransport::finish(ticket); }
    bool give_up(Ticket ticket) noexcept override { return ticket == taken || LoopbackTransport::give_up(ticket); }
    bool ends_alone() const noexcept override { return true; }
    bool lost(int) noexcept override { return lost_; }
    bool poll() override {
        if (lost_) return false;
        lost_ = true;
        const bool moved = LoopbackTransport::poll();
        lost_ = false;
        return moved;
    }

private:
    static constexpr Ticket taken = no_ticket - 1;

    bool lost_ = false;
};

}  // namespace gradsync_fuzz
