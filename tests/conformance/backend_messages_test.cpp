// SPDX-License-Identifier: BSL-1.0
// ctest: COST 20
// The engine of message_passing/ under the suite that every backend passes, over a transport of threads.
#include <algorithm>
#include <exception>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/collective/engine_collectives.hpp>
#include <gradsync/collective/messages/message_engine.hpp>
#include <gradsync/core/backend.hpp>

#include "conformance/backend.hpp"
#include "support/loopback_transport.hpp"

namespace {

class MessageBackend : public gradsync::detail::EngineCollectives<MessageBackend, gradsync::collective::Engine> {
public:
    static constexpr gradsync::BackendAbilities abilities{.poll = true, .failed = true, .tags = true};

    explicit MessageBackend(gradsync::collective::Shared<gradsync::collective::Engine> engine) : EngineCollectives(std::move(engine)) {}
    std::string describe() const { return "messages between threads"; }
    gradsync::collective::Memory allocate(std::size_t bytes) { return engine_->allocate(bytes); }

private:
    friend EngineCollectives;
    MessageBackend join(const gradsync::collective::Group& group) { return MessageBackend(engine_->split(group)); }
};
static_assert(gradsync::Backend<MessageBackend>);

struct Messages {
    using Backend = MessageBackend;
    using Memory = gradsync_test::HostMemory;
    static constexpr int largest = 4;
    static constexpr bool one_order = true;

    static bool here(int) { return true; }

    template <class F>
    static void run(int size, std::chrono::nanoseconds limit, F&& f) {
        using namespace gradsync::message_passing;
        const auto network = std::make_shared<gradsync_test::LoopbackNetwork>(size);
        network->quick_bytes = 300;  // so that some hellos are followed by a rest
        std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
        std::vector<bool> blames_another(errors.size());
        std::mutex mutex;
        std::vector<std::thread> threads;
        for (int rank = 0; rank < size; ++rank)
            threads.emplace_back([&, rank] {
                gradsync::List<int> ranks(static_cast<std::size_t>(size));
                std::iota(ranks.begin(), ranks.end(), 0);
                // Three ranks have two cores, so few of them own anything where there is little.
                const gradsync::collective::ProcessIdentity process{.machine = 1, .cores = size == 3 ? 2 : 8};
                auto world = MessageWorld::make(std::unique_ptr<Transport>(new gradsync_test::LoopbackTransport(network, rank)),
                                                gradsync::List<gradsync::collective::ProcessIdentity>(ranks.size(), process), size);
                MessageBackend backend(Shared<MessageEngine>::make(std::move(world), ranks, rank, 0, Shared<KnownMemory>::make(), limit));
                const auto failed = [&](bool by_another, const std::string& what) {
                    {
                        const std::lock_guard lock(mutex);
                        errors[static_cast<std::size_t>(rank)] = std::current_exception();
                        blames_another[static_cast<std::size_t>(rank)] = by_another;
                    }
                    backend.fail(what);
                };
                try {
                    f(MessageBackend(backend));
                } catch (const gradsync::Error& error) {
                    failed(error.context().peer >= 0 && error.context().peer != rank, error.what());
                } catch (const std::exception& error) {
                    failed(false, error.what());
                } catch (...) {
                    failed(false, "an exception that is no std::exception");
                }
            });
        for (std::thread& thread : threads) thread.join();
        for (const bool any : {false, true})
            for (std::size_t r = 0; r < errors.size(); ++r)
                if (errors[r] && (any || !blames_another[r])) std::rethrow_exception(errors[r]);
    }
};

}  // namespace

TEST_CASE("messages gives the results of the oracle") { gradsync_test::check_results<Messages>(); }
TEST_CASE("messages keeps collectives in flight") { gradsync_test::check_in_flight<Messages>(); }
TEST_CASE("messages splits into groups") { gradsync_test::check_groups<Messages>(); }
TEST_CASE("messages reports failures on every rank") { gradsync_test::check_failures<Messages>(); }
TEST_CASE("messages has the abilities that it states") { gradsync_test::check_abilities<Messages>(); }
