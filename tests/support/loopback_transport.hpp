#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <gradsync/message_passing/transport.hpp>

namespace gradsync_test {

/// Messages between threads, for tests: no byte moves before both sides have begun and one of them polls, as little
/// messages too may do in a real network.
class LoopbackNetwork {
public:
    using Transport = gradsync::message_passing::Transport;
    using Ticket = Transport::Ticket;

    explicit LoopbackNetwork(int ranks) : size(ranks), done_(static_cast<std::size_t>(ranks)) {}

    const int size;
    std::size_t quick_bytes = std::size_t{1} << 30;
    std::atomic<bool> broken{false};  ///< every call throws
    std::atomic<int> sent{0};         ///< messages, but those of the control stream, whose number varies

    Ticket send(int from, int to, int stream, const void* data, std::size_t bytes) {
        std::lock_guard lock(mutex_);
        refuse_if_broken();
        sent += stream != Transport::control_stream;
        sends_[{from, to, stream}].push_back({static_cast<const std::byte*>(data), bytes, next_});
        return next_++;
    }
    Ticket receive(int from, int to, int stream, void* data, std::size_t bytes) {
        std::lock_guard lock(mutex_);
        refuse_if_broken();
        receives_[{from, to, stream}].push_back({static_cast<std::byte*>(data), bytes, next_});
        return next_++;
    }

    /// Moves what rank `rank` is to get.
    bool poll(int rank) {
        std::lock_guard lock(mutex_);
        bool moved = false;
        refuse_if_broken();
        for (auto& [route, waiting] : receives_) {
            const auto [from, to, stream] = route;
            if (to != rank) continue;
            for (int source = 0; source < size; ++source) {
                if (from != Transport::any_rank && from != source) continue;
                auto& coming = sends_[{source, to, stream}];
                while (!waiting.empty() && !coming.empty()) {
                    if (coming.front().bytes > waiting.front().bytes) throw std::runtime_error("a message is larger than the buffer of its receive");
                    if (coming.front().bytes != 0) std::memcpy(waiting.front().data, coming.front().data, coming.front().bytes);
                    done_[static_cast<std::size_t>(to)].push_back(waiting.front().ticket);
                    done_[static_cast<std::size_t>(source)].push_back(coming.front().ticket);
                    waiting.pop_front();
                    coming.pop_front();
                    moved = true;
                }
            }
        }
        return moved;
    }

    bool finish(int rank, Ticket ticket) {
        std::lock_guard lock(mutex_);
        return std::erase(done_[static_cast<std::size_t>(rank)], ticket) != 0;
    }

    void give_up(int rank, Ticket ticket) {
        std::lock_guard lock(mutex_);
        std::erase(done_[static_cast<std::size_t>(rank)], ticket);
        for (auto& [route, waiting] : receives_) std::erase_if(waiting, [&](const auto& message) { return message.ticket == ticket; });
        for (auto& [route, coming] : sends_) std::erase_if(coming, [&](const auto& message) { return message.ticket == ticket; });
    }

private:
    template <class Byte>
    struct Message {
        Byte* data;
        std::size_t bytes;
        Ticket ticket;
    };
    using Route = std::tuple<int, int, int>;  // from, to, stream

    void refuse_if_broken() const {
        if (broken) throw std::runtime_error("the cable is cut");
    }

    std::mutex mutex_;
    Ticket next_ = 0;
    std::map<Route, std::deque<Message<const std::byte>>> sends_;
    std::map<Route, std::deque<Message<std::byte>>> receives_;
    std::vector<std::vector<Ticket>> done_;
};

/// One rank's access to it.
class LoopbackTransport final : public gradsync::message_passing::Transport {
public:
    LoopbackTransport(std::shared_ptr<LoopbackNetwork> network, int rank) : network_(std::move(network)), rank_(rank) {}

    int rank() const noexcept override { return rank_; }
    int size() const noexcept override { return network_->size; }
    int last_stream() const noexcept override { return 32767; }
    const char* refusal() const noexcept override { return nullptr; }
    std::mutex& mutex() noexcept override { return mutex_; }
    std::size_t quick_bytes() const noexcept override { return network_->quick_bytes; }
    Ticket send(int to, int stream, const void* data, std::size_t bytes) override { return network_->send(rank_, to, stream, data, bytes); }
    Ticket receive(int from, int stream, void* data, std::size_t bytes) override { return network_->receive(from, rank_, stream, data, bytes); }
    bool poll() override { return network_->poll(rank_); }
    bool finish(Ticket ticket) override { return network_->finish(rank_, ticket); }
    bool give_up(Ticket ticket) noexcept override {
        network_->give_up(rank_, ticket);
        return true;
    }

private:
    std::shared_ptr<LoopbackNetwork> network_;
    const int rank_;
    std::mutex mutex_;
};

}  // namespace gradsync_test
