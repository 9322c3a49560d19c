// SPDX-License-Identifier: BSL-1.0
// A stranger sends the bytes of the input to whoever takes the calls of ranks; then a rank calls, and must be heard.
#include <sys/un.h>

#include <thread>

#include <gradsync/bootstrap/reception.hpp>

#include "fuzz.hpp"

namespace net = gradsync::net;

namespace {

/// Rank 0 of two, which hears rank 1 again and again. Not over TCP, where each connection would take a port for a minute.
class Called {
public:
    Called() {
        net::Socket listener = net::Socket::of_family(AF_UNIX);
        socklen_t size = sizeof(sa_family_t);  // the system chooses a name
        const bool listens = ::bind(listener.get(), address(), size) == 0 && ::listen(listener.get(), 100) == 0;
        size_ = sizeof name_;
        gradsync_fuzz::check(listens && ::getsockname(listener.get(), address(), &size_) == 0, "no socket to listen at");
        reception_ = net::Reception(std::move(listener), {.size = 2, .to = 0}, key);
        std::thread([this] {
            gradsync::List<int> expected;
            expected.push_back(1);
            for (;;) (void)reception_.answer(net::Clock::now() + std::chrono::hours(1), expected);
        }).detach();
    }
    net::Socket call() {
        net::Socket socket = net::Socket::of_family(AF_UNIX);
        gradsync_fuzz::check(::connect(socket.get(), address(), size_) == 0, "nobody listens");
        return socket;
    }

    const net::Hash key = gradsync::bootstrap::hmac("token", "rendezvous");

private:
    sockaddr* address() noexcept { return reinterpret_cast<sockaddr*>(&name_); }

    sockaddr_un name_{.sun_family = AF_UNIX, .sun_path = {}};
    socklen_t size_ = 0;
    net::Reception reception_;
};

}  // namespace

static const gradsync_fuzz::Target target("reception", [](gradsync_fuzz::Input input) {
    static Called& called = *new Called;
    const net::Socket stranger = called.call();
    (void)!::send(stranger.get(), input.data(), input.size(), MSG_NOSIGNAL);
    ::shutdown(stranger.get(), SHUT_WR);
    // As `net::connect` does: a rank is turned away, too, if this process did not run for some seconds.
    const auto deadline = net::Clock::now() + std::chrono::seconds(60);
    net::Answer answer;
    do answer = net::introduce(called.call(), {.size = 2, .from = 1, .to = 0}, called.key, deadline);
    while (answer.silent && net::Clock::now() < deadline && ::usleep(20'000) == 0);
    gradsync_fuzz::check(static_cast<bool>(answer.channel), "a stranger keeps a rank out");
});
