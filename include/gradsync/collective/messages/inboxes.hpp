// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../in_flight.hpp"
#include "transport.hpp"

namespace gradsync::inline v0_2::message_passing {

/// A queue, first in, first out, that keeps its memory.
template <class T>
using Queue = collective::InFlight<T>;

/// A receive that has begun. The length of its message is added to `came`, if that is not null.
struct Posted {
    std::byte* data;
    std::size_t bytes;
    Transport::Ticket ticket;
    std::size_t* came;
};

/// A message that came before its receive.
struct Kept {
    int rank = -1;
    List<std::byte> bytes = {};
};

/// Up to `most` blocks of memory that are free for the next users.
template <class Block, std::size_t most>
class SpareMemory {
public:
    /// The smallest block that suffices, or a new one.
    Block take(std::size_t bytes) {
        Block* best = nullptr;
        for (Block& block : blocks_)
            if (block.capacity() >= bytes && (best == nullptr || block.capacity() < best->capacity())) best = &block;
        if (best == nullptr) return Block(bytes);
        std::swap(*best, blocks_.back());
        Block room = std::move(blocks_.back());
        blocks_.pop_back();
        return room;
    }
    void keep(Block block) {
        if (blocks_.size() < most) return blocks_.push_back(std::move(block));
        for (Block& one : blocks_)  // keep the longer ones
            if (one.capacity() < block.capacity()) std::swap(one, block);
    }

private:
    List<Block> blocks_;
};

/// The receives of a stream that have begun, or the messages that came before their receives. One of the two is empty.
struct Inbox {
    int stream = 0;
    Queue<Posted> posted = Queue<Posted>(1);
    Queue<Kept> kept = Queue<Kept>(1);
};

/// The inboxes of the streams in use. References are valid until another inbox is made or forgotten.
class Inboxes {
public:
    Inbox& operator[](int stream) {
        std::size_t first = 0;
        for (std::size_t end = all_.size(); first < end;) {
            const std::size_t middle = (first + end) / 2;
            if (all_[middle].stream < stream) first = middle + 1;
            else end = middle;
        }
        if (first < all_.size() && all_[first].stream == stream) return all_[first];
        all_.push_back({.stream = stream});
        for (std::size_t i = all_.size() - 1; i > first; --i) std::swap(all_[i], all_[i - 1]);
        return all_[first];
    }
    Inbox* begin() noexcept { return all_.begin(); }
    Inbox* end() noexcept { return all_.end(); }
    /// Forgets the streams from `first` to `last`.
    void forget(int first, int last) {
        all_.erase_if([&](const Inbox& inbox) { return inbox.stream >= first && inbox.stream <= last; });
    }

private:
    List<Inbox> all_;  ///< sorted by stream
};

}  // namespace gradsync::inline v0_2::message_passing
