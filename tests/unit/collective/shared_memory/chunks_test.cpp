// SPDX-License-Identifier: BSL-1.0
// Collectives whose pieces are moved by hand, as ProcessEngine moves them, beside what they mean.
#include <gradsync/collective/shared_memory/chunks.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "support/random.hpp"

namespace {

using gradsync::ElementRange;
using gradsync::shard_range;
using gradsync::collective::Call;
using gradsync::collective::Operation;
using gradsync::shared_memory::StagedPieces;

using Numbers = std::vector<std::int64_t>;
constexpr std::int64_t untouched = -77;

Numbers part(const Numbers& whole, ElementRange range) {
    return {whole.begin() + static_cast<std::ptrdiff_t>(range.first), whole.begin() + static_cast<std::ptrdiff_t>(range.last)};
}

/// Of one rank: those of its call, and what it is to find in the second.
struct Buffers {
    Numbers in, out, expected;
};

std::vector<Buffers> buffers_for(Operation operation, std::size_t whole, int size, int root, gradsync_test::Random& random) {
    std::vector<Numbers> brought;  // by rank, as long as the whole
    Numbers sum(whole), gathered(whole);
    for (int r = 0; r < size; ++r) {
        Numbers& own = brought.emplace_back();
        for (std::size_t i = 0; i < whole; ++i) own.push_back(static_cast<std::int64_t>(random.below(1000)));
        for (std::size_t i = 0; i < whole; ++i) sum[i] += own[i];
        const ElementRange shard = shard_range(whole, size, r);
        for (std::size_t i = shard.first; i < shard.last; ++i) gathered[i] = own[i];
    }
    std::vector<Buffers> ranks;
    for (int r = 0; r < size; ++r) {
        const Numbers& own = brought[static_cast<std::size_t>(r)];
        const Numbers& of_root = brought[static_cast<std::size_t>(root)];
        const ElementRange shard = shard_range(whole, size, r);
        Buffers rank;
        switch (operation) {
            case Operation::all_reduce: rank = {own, {}, sum}; break;
            case Operation::reduce: rank = {own, {}, r == root ? sum : Numbers{}}; break;
            case Operation::reduce_scatter: rank = {own, {}, part(sum, shard)}; break;
            case Operation::all_gather: rank = {part(own, shard), {}, gathered}; break;
            case Operation::gather: rank = {part(own, shard), {}, r == root ? gathered : Numbers{}}; break;
            // The root of a broadcast has it already: its buffer is the same on both sides.
            case Operation::broadcast: rank = r == root ? Buffers{own, {}, {}} : Buffers{{}, {}, of_root}; break;
            default: rank = {r == root ? own : Numbers{}, {}, part(of_root, shard)};
        }
        rank.out.assign(rank.expected.size(), untouched);
        ranks.push_back(rank);
    }
    return ranks;
}

}  // namespace

TEST_CASE("StagedPieces: pieces that are brought, combined in the areas and fetched make the collective") {
    gradsync_test::Random random(7);
    for (const Operation operation : {Operation::all_reduce, Operation::reduce, Operation::reduce_scatter, Operation::all_gather,
                                      Operation::broadcast, Operation::gather, Operation::scatter})
        for (int size = 1; size <= 4; ++size)
            for (const std::size_t whole : {0u, 1u, 2u, 3u, 5u, 16u, 23u, 64u})
                for (const std::size_t most : {1u, 3u, 7u, 100u}) {
                    const int root = static_cast<int>(random.below(static_cast<std::size_t>(size)));
                    CAPTURE(std::string(name_of(operation)));
                    CAPTURE(size);
                    CAPTURE(whole);
                    CAPTURE(most);
                    std::vector<Buffers> ranks = buffers_for(operation, whole, size, root, random);
                    std::vector<StagedPieces> pieces;
                    for (int r = 0; r < size; ++r) {
                        Call call;
                        call.operation = operation;
                        call.root = root;
                        call.dtype = gradsync::DType::i64;
                        pieces.emplace_back(call, whole, r, size, most * sizeof(std::int64_t));
                    }
                    std::size_t taken = 0;
                    while (!pieces[0].all_taken()) {
                        REQUIRE(++taken <= whole / most + static_cast<std::size_t>(size));
                        std::vector<StagedPieces::Piece> now;
                        for (StagedPieces& of_rank : pieces) now.push_back(of_rank.take());
                        std::vector<Numbers> areas(static_cast<std::size_t>(size), Numbers(now[0].range.size(), untouched));
                        for (std::size_t r = 0; r < areas.size(); ++r) {
                            CHECK(now[r].range == now[0].range);
                            CHECK(pieces[r].all_taken() == pieces[0].all_taken());
                            REQUIRE(now[r].range.size() <= most);
                            const auto [range, begins] = pieces[r].brings(now[r]);
                            for (std::size_t i = range.first; i < range.last; ++i)
                                areas[r][i - now[r].range.first] = ranks[r].in.at(i - begins);
                        }
                        std::byte area{};
                        const Call inner = pieces[0].call_on(&area, now[0]);
                        CHECK(inner.operation == (gradsync::collective::reduces(operation) ? Operation::all_reduce : Operation::broadcast));
                        CHECK((inner.in == &area && inner.out == &area));
                        CHECK((inner.in_count == now[0].range.size() && inner.out_count == inner.in_count));
                        Numbers result(now[0].range.size());
                        for (std::size_t i = 0; i < result.size(); ++i) {
                            if (inner.operation == Operation::broadcast) result[i] = areas[static_cast<std::size_t>(inner.root)][i];
                            else
                                for (const Numbers& brought : areas) result[i] += brought[i];
                        }
                        for (std::size_t r = 0; r < areas.size(); ++r) {
                            CHECK(pieces[r].call_on(&area, now[r]).root == inner.root);
                            const auto [range, begins] = pieces[r].fetches(now[r]);
                            for (std::size_t i = range.first; i < range.last; ++i)
                                ranks[r].out.at(i - begins) = result[i - now[r].range.first];
                        }
                    }
                    CHECK(taken >= 1);
                    for (const StagedPieces& of_rank : pieces) CHECK(of_rank.all_taken());
                    for (const Buffers& rank : ranks) CHECK(rank.out == rank.expected);
                }
}
