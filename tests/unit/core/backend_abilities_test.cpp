// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <cstddef>

#include <gradsync/backend/tcp.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/core/clock.hpp>
#include <gradsync/core/requirements.hpp>
#include <gradsync/planning/faulty_backend.hpp>
#include <gradsync/planning/simulated_backend.hpp>

#include <doctest/doctest.h>

using namespace gradsync;

namespace {

/// A backend with members of optional abilities, which states the given ones.
template <BackendAbilities stated>
struct Optional {
    static constexpr BackendAbilities abilities = stated;

    double now() const { return 42; }
    void set_tag(CollectiveTag tag) { code = tag.code(); }
    std::size_t next_owner() { return 7; }

    int code = 0;
};

struct Silent {
    double now() const { return 42; }
};

}  // namespace

TEST_CASE("BackendAbilities: every backend of the library states what it has, and a wrapper what its backend has") {
    static_assert(require_backend<ThreadBackend>() && require_backend<TcpBackend>() && require_backend<SimulatedBackend>());
    static_assert(require_backend<FaultyBackend<TcpBackend>>() && require_backend<FaultyBackend<SimulatedBackend>>());
    static_assert(abilities_of<ThreadBackend>.cheaper_alone);
    static_assert(abilities_of<FaultyBackend<TcpBackend>>.progress_thread && !abilities_of<FaultyBackend<ThreadBackend>>.progress_thread);
    static_assert(abilities_of<FaultyBackend<SimulatedBackend>>.clock && !abilities_of<FaultyBackend<TcpBackend>>.clock);
}

TEST_CASE("BackendAbilities: a backend that states none has none") {
    static_assert(!abilities_of<Silent>.clock && !abilities_of<Silent>.tags && !abilities_of<int>.poll);
    CHECK(backend_seconds(Silent()) != 42);
}

TEST_CASE("BackendAbilities: what is stated is used, and nothing else") {
    Optional<BackendAbilities{.tags = true, .clock = true}> stated;
    detail::set_tag(stated, {CollectiveTag::Kind::bucket, 1, 3});
    CHECK(stated.code != 0);
    CHECK(detail::next_owner(stated) == 7);
    CHECK(backend_seconds(stated) == 42);
    CHECK(backend_now(stated).time_since_epoch() == std::chrono::seconds(42));

    Optional<BackendAbilities{}> silent;
    detail::set_tag(silent, {CollectiveTag::Kind::bucket, 1, 3});
    CHECK(silent.code == 0);
    CHECK(detail::next_owner(silent) == 0);
    CHECK(backend_seconds(silent) != 42);
}
