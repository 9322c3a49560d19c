// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <iterator>

#include "core/list.hpp"
#include "core/requirements.hpp"
#include "kernel/elementwise.hpp"
#include "kernel/host_buffer.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

/// Returns the mistake in this rank's arguments as text, or "" if there is none.
inline std::string problem_of_rows(BufferView gradient, std::size_t width, const List<std::uint64_t>& own,
                                   ConstBufferView values) {
    if (!is_floating(gradient.dtype) || values.dtype != gradient.dtype)
        return text("the gradient and the values must have the same floating type, not ", gradient.dtype, " and ",
                    values.dtype);
    if (width == 0 || gradient.count % width != 0)
        return text("a gradient of ", gradient.count, " elements has no rows of ", width);
    if (values.count != own.size() * width)
        return text(own.size(), " rows of ", width, " are ", own.size() * width, " values, not ", values.count);
    const std::size_t height = gradient.count / width;
    for (const std::uint64_t row : own)
        if (row >= height)
            return text("there is no row ", static_cast<std::int64_t>(row), "; the gradient has ", height);
    return {};
}

/// Returns the number of different rows of each rank. Throws on every rank if one has a problem, or if gradients or
/// operations differ.
template <class B>
List<std::uint64_t> agree_on_rows(B& comm, const char* operation, ReduceOp op, BufferView gradient, std::size_t width,
                                  std::uint64_t different, const std::string& problem) {
    constexpr auto wrong = static_cast<std::uint64_t>(-1);
    const std::uint64_t facts[] = {problem.empty() ? different : wrong, gradient.count, width,
                                   static_cast<std::uint64_t>(gradient.dtype) << 8 | static_cast<std::uint64_t>(op)};
    constexpr std::size_t n = std::size(facts);
    const List<std::uint64_t> all = gather_values(comm, facts);
    if (!problem.empty()) refuse({operation, named_rank(comm)}, problem);
    List<std::uint64_t> counts(all.size() / n);
    for (std::size_t r = 0; r < counts.size(); ++r) {
        counts[r] = all[r * n];
        bool differs = false;
        for (std::size_t k = 1; k < n; ++k) differs = differs || all[r * n + k] != all[k];
        if (counts[r] == wrong || differs)
            raise(
                Errc::invalid_argument, {.operation = operation, .rank = named_rank(comm), .peer = named_rank(comm, r)},
                operation, ": rank ", named_rank(comm, r),
                counts[r] == wrong ? " passed invalid rows; its own error says which"
                                   : " has a gradient of another shape or type than the first rank, or one of the two "
                                     "calls average_rows and the other sum_rows");
    }
    return counts;
}

/// Reduces rows over the ranks and adds them to `gradient`. Row k of `values` belongs to row `own[k]` of the gradient.
template <class B>
void reduce_rows(B comm, const char* operation, ReduceOp op, BufferView gradient, std::size_t width,
                 List<std::uint64_t> own, ConstBufferView values) {
    const std::string problem = problem_of_rows(gradient, width, own, values);
    // Duplicate rows are added up in their order, in the type in which they travel.
    List<std::uint64_t> order(own.size());
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = k;
    sort_by(order, [&](std::uint64_t a, std::uint64_t b) { return own[a] < own[b]; });
    std::uint64_t different = 0;
    for (std::size_t k = 0; k < order.size(); ++k) different += k == 0 || own[order[k]] != own[order[k - 1]];
    const List<std::uint64_t> counts = agree_on_rows(comm, operation, op, gradient, width, different, problem);
    std::size_t most = 0;
    for (const std::uint64_t count : counts) most = larger<std::size_t>(most, count);
    if (most == 0) return;

    const std::size_t height = gradient.count / width;
    const DType dtype = accumulator_of(gradient.dtype);
    const auto ranks = static_cast<std::size_t>(comm.size()), rank = static_cast<std::size_t>(comm.rank());
    // An all-reduce sends each element at most twice.
    const bool dense =
        most * ranks * (width * size_of(dtype) + sizeof(std::uint64_t)) >= 2 * gradient.count * size_of(dtype);
    const std::size_t rows = dense ? height : most * ranks;
    const kernel::HostBuffer memory(rows * width * size_of(dtype));
    const BufferView sums = typed_view(memory.data(), rows * width, dtype);
    List<std::uint64_t> places(dense ? 0 : rows);
    std::size_t at = rank * most;
    for (std::size_t k = 0; k < order.size(); ++k) {
        const std::uint64_t row = own[order[k]];
        if (k != 0 && row != own[order[k - 1]]) ++at;
        if (!dense) places[at] = row;
        kernel::add(sums.subview((dense ? row : at) * width, width), values.subview(order[k] * width, width));
    }
    if (op == ReduceOp::mean) kernel::scale(sums, 1.0 / static_cast<double>(ranks));
    if (dense) {
        comm.all_reduce(sums, ReduceOp::sum).wait();
        return kernel::add(gradient, sums);
    }
    const auto shard = [&](auto whole) { return shard_of(whole, comm.size(), comm.rank()); };
    auto indices = comm.all_gather(shard(buffer(places)), buffer(places));
    comm.all_gather(shard(sums), sums).wait();
    indices.wait();
    for (std::size_t r = 0; r < ranks; ++r)
        for (std::size_t k = r * most; k < r * most + counts[r]; ++k) {
            if (places[k] >= height)
                refuse({operation, named_rank(comm)}, "rank ", named_rank(comm, r), " sent row ", places[k], " of ",
                       height);
            kernel::add(gradient.subview(places[k] * width, width), sums.subview(k * width, width));
        }
}

template <class B, class Gradient, class Rows, class Values>
void reduce_rows_in_place(const B& comm, const char* operation, ReduceOp op, Gradient&& gradient, std::size_t width,
                          const Rows& rows, const Values& values) {
    static_assert(require_backend<B>());
    static_assert(B::memory_space == MemorySpace::host,
                  "gradsync: rows are averaged in host memory; use gradsync::average");
    static_assert(std::is_integral_v<std::remove_cvref_t<decltype(*std::ranges::data(rows))>>,
                  "gradsync: pass row numbers as integers");
    List<std::uint64_t> numbers(std::ranges::size(rows));
    for (std::size_t k = 0; k < numbers.size(); ++k)
        numbers[k] = static_cast<std::uint64_t>(std::ranges::data(rows)[k]);
    reduce_rows(comm, operation, op, buffer(std::forward<Gradient>(gradient)), width, std::move(numbers),
                const_buffer(values));
}

}  // namespace detail

/// Averages rows over the ranks and adds them to a matrix. For the gradient of an embedding: a batch touches few rows,
/// and only these rows travel.
///
///     model.backward(batch, [&](std::size_t i) { sync.mark_ready(i); });  // a tied embedding: the output layer's part
///     sync.finish();
///     gs::average_rows(comm, model.embedding_gradient, width, batch.tokens, input_gradients);
///
/// `gradient` is a matrix with rows of `width` elements, with the same shape and floating type on all ranks. `rows` is
/// a contiguous range of integers, in which a row may occur several times. `values` has `size(rows) * width` elements
/// of the gradient's type: its row k is added to row `rows[k]` of the gradient. Each rank passes its own rows, or none.
/// The caller owns all memory, which is host memory.
///
/// Order of the sum: each rank adds up its values for a row in their order, in f32 (f64 for f64), and multiplies the
/// sum by one over the number of ranks. The ranks' results are added to the gradient in rank order. If the ranks have
/// so many rows that the whole matrix costs no more, it is all-reduced instead, in the backend's order. The bits depend
/// on the number of ranks, but not on timing.
///
/// Cost: all-gathers of the rows and their numbers, padded to the largest number of distinct rows on any rank, and
/// memory for them during the call. Nothing overlaps with computation. All ranks have the same weight, regardless of
/// `Reducer::set_weight`. Collective. Throws Error(invalid_argument) on all ranks if shapes, types or a row are wrong
/// on one of them; the gradient is then unchanged. Throws what a wait throws; the gradient is then unspecified.
template <class B, class Gradient, class Rows, class Values>
void average_rows(const B& comm, Gradient&& gradient, std::size_t width, const Rows& rows, const Values& values) {
    detail::reduce_rows_in_place(comm, "average_rows", ReduceOp::mean, std::forward<Gradient>(gradient), width, rows,
                                 values);
}

/// As `average_rows`, but with the sum over the ranks.
template <class B, class Gradient, class Rows, class Values>
void sum_rows(const B& comm, Gradient&& gradient, std::size_t width, const Rows& rows, const Values& values) {
    detail::reduce_rows_in_place(comm, "sum_rows", ReduceOp::sum, std::forward<Gradient>(gradient), width, rows,
                                 values);
}

}  // namespace gradsync::inline v0_2
