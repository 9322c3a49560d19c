// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "core/list.hpp"
#include "core/requirements.hpp"
#include "kernel/elementwise.hpp"
#include "kernel/host_buffer.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

/// The rows that one rank or another adds to `gradient`: `own[k]` is the number of row k of `values`.
template <class B>
void reduce_rows(B comm, const char* operation, ReduceOp op, BufferView gradient, std::size_t width, List<std::uint64_t> own,
                 ConstBufferView values) {
    std::string problem;
    const std::size_t height = width == 0 ? 0 : gradient.count / width;
    if (!is_floating(gradient.dtype) || values.dtype != gradient.dtype)
        problem = text("the gradient and the values are of one floating type, not of ", gradient.dtype, " and ", values.dtype);
    else if (width == 0 || gradient.count % width != 0)
        problem = text("a gradient of ", gradient.count, " elements has no rows of ", width);
    else if (values.count != own.size() * width)
        problem = text(own.size(), " rows of ", width, " are ", own.size() * width, " values, not ", values.count);
    for (const std::uint64_t row : own)
        if (row >= height && problem.empty())
            problem = text("there is no row ", static_cast<std::int64_t>(row), "; the gradient has ", height);
    constexpr auto wrong = static_cast<std::uint64_t>(-1);

    // Rows that occur several times are added up, in their order, in the type in which they then travel.
    List<std::uint64_t> order(own.size());
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = k;
    sort_by(order, [&](std::uint64_t a, std::uint64_t b) { return own[a] < own[b]; });
    std::uint64_t different = 0;
    for (std::size_t k = 0; k < order.size(); ++k) different += k == 0 || own[order[k]] != own[order[k - 1]];
    if (!problem.empty()) different = wrong;
    const List<std::uint64_t> counts = gather_values(comm, {&different, 1});
    if (!problem.empty()) refuse(operation, problem, comm.rank());
    for (std::size_t r = 0; r < counts.size(); ++r)
        if (counts[r] == wrong)
            raise(Errc::invalid_argument, text(operation, ": rank ", r, " gave wrong rows; see what it says"),
                  {.operation = operation, .rank = comm.rank(), .peer = static_cast<int>(r)});
    std::size_t most = 0;
    for (const std::uint64_t count : counts) most = larger<std::size_t>(most, count);
    if (most == 0) return;

    const DType dtype = accumulator_of(gradient.dtype);
    const auto ranks = static_cast<std::size_t>(comm.size()), rank = static_cast<std::size_t>(comm.rank());
    // An all-reduce sends each element twice at most.
    const bool dense = most * ranks * (width * size_of(dtype) + sizeof(std::uint64_t)) >= 2 * gradient.count * size_of(dtype);
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
            if (places[k] >= height) refuse(operation, text("rank ", r, " sent row ", places[k], " of ", height), comm.rank());
            kernel::add(gradient.subview(places[k] * width, width), sums.subview(k * width, width));
        }
}

template <class B, class Gradient, class Rows, class Values>
void reduce_rows_in_place(const B& comm, const char* operation, ReduceOp op, Gradient&& gradient, std::size_t width, const Rows& rows,
                          const Values& values) {
    static_assert(require_backend<B>());
    static_assert(B::memory_space == MemorySpace::host, "gradsync: rows are averaged in host memory; use gradsync::average");
    static_assert(std::is_integral_v<std::remove_cvref_t<decltype(*std::data(rows))>>, "gradsync: rows are numbers of rows: integers");
    List<std::uint64_t> numbers(std::size(rows));
    for (std::size_t k = 0; k < numbers.size(); ++k) numbers[k] = static_cast<std::uint64_t>(std::data(rows)[k]);
    reduce_rows(comm, operation, op, buffer(std::forward<Gradient>(gradient)), width, std::move(numbers), const_buffer(values));
}

}  // namespace detail

/// Adds to some rows of a matrix the mean over the ranks of what each rank has for them. For the gradient of an embedding, of which a batch
/// touches few rows: they travel, and the matrix does not.
///
///     model.backward(batch, [&](std::size_t i) { sync.mark_ready(i); });  // of a tied embedding: the output layer's part
///     sync.finish();
///     gs::average_rows(comm, model.embedding_gradient, width, batch.tokens, input_gradients);
///
/// `gradient` has rows of `width` elements. `values` has `size(rows) * width` elements of the same floating type, in host memory: row k of it
/// belongs to row `rows[k]` of the gradient, which may occur several times. `rows` is a contiguous range of integers. Each rank has rows
/// of its own, or none. The caller owns all memory, and gives the same shape and type of the gradient on all ranks.
///
/// Order of the sum: each rank adds up its values for a row in their order, in f32 (f64 for f64), and multiplies the sum by one over the
/// number of ranks. The ranks' results are added to the gradient in rank order. If the ranks together have so many rows that it costs no
/// more, the whole matrix is all-reduced instead, in the order of the backend. So the bits depend on the number of ranks; they do not depend on
/// timing.
///
/// Cost: all-gathers of the largest rank's number of different rows, padded on the others, and memory for them during the call. It does not overlap
/// with computation.
/// Every rank counts the same, whatever the weights of a Reducer. Collective. Throws Error(invalid_argument) on
/// all ranks if shapes, types or a row are wrong on one of them; the gradient stays as it was. Throws what a wait throws; the gradient is
/// unspecified then.
template <class B, class Gradient, class Rows, class Values>
void average_rows(const B& comm, Gradient&& gradient, std::size_t width, const Rows& rows, const Values& values) {
    detail::reduce_rows_in_place(comm, "average_rows", ReduceOp::mean, std::forward<Gradient>(gradient), width, rows, values);
}

/// The same with the sum over the ranks.
template <class B, class Gradient, class Rows, class Values>
void sum_rows(const B& comm, Gradient&& gradient, std::size_t width, const Rows& rows, const Values& values) {
    detail::reduce_rows_in_place(comm, "sum_rows", ReduceOp::sum, std::forward<Gradient>(gradient), width, rows, values);
}

}  // namespace gradsync::inline v0_2
