// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gradsync/collective/messages/transport.hpp>

namespace gradsync_test {

/// Messages between threads, for tests: no byte moves before both sides have begun and one of them polls, as little
/// messages too may do in a real network.
class LoopbackNetwork {
public:
    using Transport = gradsync::message_passing::Transport;
    using Ticket = Transport::Ticket;

    explicit LoopbackNetwork(int ranks) : size(ranks), boxes_(static_cast<std::size_t>(ranks)) {}

    const int size;
    std::size_t quick_bytes = std::size_t{1} << 30;
    std::atomic<bool> broken{false};  ///< every call throws
    std::atomic<int> sent{0};         ///< messages, but those of the control stream, whose number varies

    Ticket send(int from, int to, int stream, const void* data, std::size_t bytes) {
        refuse_if_broken();
        sent += stream != Transport::control_stream;
        Box& box = box_of(to);
        std::lock_guard lock(box.mutex);
        const Ticket ticket = next_++;
        box.sends[{from, stream}].push_back({static_cast<const std::byte*>(data), bytes, ticket});
        box.has_news = true;
        return ticket;
    }
    Ticket receive(int from, int to, int stream, void* data, std::size_t bytes, std::size_t* came) {
        refuse_if_broken();
        Box& box = box_of(to);
        std::lock_guard lock(box.mutex);
        const Ticket ticket = next_++;
        box.receives[{from, stream}].push_back({static_cast<std::byte*>(data), bytes, ticket, came});
        box.has_news = true;
        return ticket;
    }

    /// Moves what rank `to` is to get.
    bool poll(int to) {
        refuse_if_broken();
        Box& box = box_of(to);
        if (!box.has_news) return false;
        std::lock_guard lock(box.mutex);
        box.has_news = false;
        bool moved = false;
        for (auto& [route, waiting] : box.receives) {
            const auto [from, stream] = route;
            for (int source = 0; source < size && !waiting.empty(); ++source) {
                if (from != Transport::any_rank && from != source) continue;
                auto& coming = box.sends[{source, stream}];
                while (!waiting.empty() && !coming.empty()) {
                    if (coming.front().bytes > waiting.front().bytes) {
                        box.has_news = true;  // whoever polls next hears of it, too
                        throw std::runtime_error("a message is larger than the buffer of its receive");
                    }
                    if (coming.front().bytes != 0) std::memcpy(waiting.front().data, coming.front().data, coming.front().bytes);
                    if (waiting.front().came != nullptr) *waiting.front().came += coming.front().bytes;
                    box.done.add(waiting.front().ticket);
                    box_of(source).done.add(coming.front().ticket);
                    waiting.pop_front();
                    coming.pop_front();
                    moved = true;
                }
            }
        }
        return moved;
    }

    bool finish(int rank, Ticket ticket) { return box_of(rank).done.take(ticket); }

    void give_up(int rank, Ticket ticket) {
        for (Box& box : boxes_) {
            std::lock_guard lock(box.mutex);
            for (auto& [route, waiting] : box.receives)
                std::erase_if(waiting, [&](const auto& message) { return message.ticket == ticket; });
            for (auto& [route, coming] : box.sends) std::erase_if(coming, [&](const auto& message) { return message.ticket == ticket; });
        }
        box_of(rank).done.take(ticket);
    }

private:
    template <class Byte>
    struct Message {
        Byte* data;
        std::size_t bytes;
        Ticket ticket;
        std::size_t* came = nullptr;
    };
    using Route = std::pair<int, int>;  // from, stream

    class Done {
    public:
        void add(Ticket ticket) {
            std::lock_guard lock(mutex_);
            tickets_.push_back(ticket);
            count_ = tickets_.size();
        }
        bool take(Ticket ticket) {
            if (count_ == 0) return false;
            std::lock_guard lock(mutex_);
            const bool found = std::erase(tickets_, ticket) != 0;
            count_ = tickets_.size();
            return found;
        }

    private:
        std::atomic<std::size_t> count_{0};
        std::mutex mutex_;
        std::vector<Ticket> tickets_;
    };

    /// What is on its way to one rank, and which of the rank's own messages are over. Ranks poll all the time: they take no lock for
    /// nothing.
    struct Box {
        std::atomic<bool> has_news{false};  ///< since the last poll
        std::mutex mutex;
        std::map<Route, std::deque<Message<const std::byte>>> sends;
        std::map<Route, std::deque<Message<std::byte>>> receives;
        Done done;
    };
    Box& box_of(int rank) { return boxes_[static_cast<std::size_t>(rank)]; }

    void refuse_if_broken() const {
        if (broken) throw gradsync::message_passing::CallFailed("the cable is cut");
    }

    std::atomic<Ticket> next_{0};
    std::vector<Box> boxes_;
};

/// One rank's access to it.
class LoopbackTransport : public gradsync::message_passing::Transport {
public:
    LoopbackTransport(std::shared_ptr<LoopbackNetwork> network, int rank) : network_(std::move(network)) {
        rank_ = rank, size_ = network_->size, last_stream_ = 32767;
    }

    const char* refusal() const noexcept override { return nullptr; }
    std::mutex& mutex() noexcept override { return mutex_; }
    std::size_t quick_bytes() const noexcept override { return network_->quick_bytes; }
    bool in_parts(std::size_t bytes) const noexcept override { return bytes <= 8 * network_->quick_bytes; }
    Ticket send(int to, int stream, const void* data, std::size_t bytes, bool) override {
        return network_->send(rank_, to, stream, data, bytes);
    }
    Ticket receive(int from, int stream, void* data, std::size_t bytes, std::size_t* came, std::size_t) override {
        return network_->receive(from, rank_, stream, data, bytes, came);
    }
    bool poll() override { return network_->poll(rank_); }
    bool finish(Ticket ticket) override { return network_->finish(rank_, ticket); }
    bool give_up(Ticket ticket) noexcept override {
        network_->give_up(rank_, ticket);
        return true;
    }

private:
    std::shared_ptr<LoopbackNetwork> network_;
    std::mutex mutex_;
};

}  // namespace gradsync_test
