// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/kernel/reduce.hpp>

#include "census.hpp"
#include "fake.hpp"
#include "planned_failures.hpp"

namespace {

using gradsync_fake::census;

enum class Kind { all_reduce, reduce, broadcast, reduce_scatter, all_gather };

/// What one rank brings to a collective.
struct Part {
    Kind kind;
    const void* in;
    void* out;
    std::size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;      ///< the kind of operation: one of NCCL's own, or ncclNumOps for all scaled sums
    const void* scalar;  ///< of a scaled sum
    int root;
    std::vector<std::byte> sent = {};  ///< the elements as they travel: no rank reads another's memory
    double factor = 1;                 ///< the scalar
    std::size_t group = 1, place = 0;  ///< collectives of its group, and those before it

    bool fits(const Part& other) const {
        return kind == other.kind && count == other.count && type == other.type && op == other.op && root == other.root &&
               group == other.group && place == other.place;
    }
};

struct Meeting {
    std::vector<std::unique_ptr<Part>> parts;
    std::size_t arrived = 0, computed = 0;
};

/// Ranks connect before their first small and their first large collective of each kind. A sender and a receiver connect before their first
/// message.
struct Connection {
    int kind, from, to;
    auto operator<=>(const Connection&) const = default;
    std::size_t ranks(int size) const { return from == to ? 1 : from < 0 ? static_cast<std::size_t>(size) : 2; }
};

struct World {
    explicit World(int size_) : size(size_) {}
    const int size;
    std::mutex mutex;
    std::condition_variable changed;
    int joined = 0, closed = 0;
    std::map<std::uint64_t, std::shared_ptr<Meeting>> meetings;
    std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> mail;  // from, to
    std::vector<ncclComm*> comms;
    std::map<Connection, std::set<int>> connecting;           ///< the ranks that have begun to
    std::map<std::size_t, std::vector<std::size_t>> windows;  ///< by the number of the call: the bytes that ranks have said
};

std::mutex registry_mutex;
auto& registry = *new std::map<std::uint64_t, std::shared_ptr<World>>;  // for as long as there are threads
std::uint64_t next_id = 1;
std::atomic<int> misuse_count{0}, slowness{0}, launch_count{0}, version{NCCL_VERSION_CODE}, window_count{0};
std::atomic<bool> has_windows{true}, connects_late{false};

gradsync_fake::PlannedFailures<ncclResult_t> refusals;

}  // namespace

struct ncclComm {
    std::shared_ptr<World> world;
    int rank;
    std::uint64_t next = 0;
    std::atomic<bool> aborted{false};
    std::atomic<int> looks_left{0};
    std::atomic<int> error{ncclSuccess};
    std::vector<std::pair<const void*, bool>> scalars;  // and whether on the device
    std::vector<Connection> connecting;                 ///< of its last launch; guarded by the world's mutex
    std::size_t window_calls = 0;
    ncclWindow_t* window = nullptr;  ///< to be written when all ranks have called
    int open_windows = 0;
};

namespace {

/// Communicators that were handed out, so that calls on others are noticed. Their memory stays: work on streams may refer to it.
std::mutex living_mutex;
std::set<ncclComm*> living_comms;
auto& all_comms = *new std::vector<std::unique_ptr<ncclComm>>;  // for as long as there are threads

/// With the last rank goes what nobody took.
void close(World& world) {
    if (++world.closed < world.size) return;
    world.meetings.clear();
    world.mail.clear();
}

/// With `connect_late` a start is in progress until all ranks have come, if it is the first of its kind.
bool is_connecting(ncclComm* comm) {
    const std::lock_guard lock(comm->world->mutex);
    std::erase_if(comm->connecting, [&](const Connection& c) { return comm->world->connecting[c].size() == c.ranks(comm->world->size); });
    return !comm->connecting.empty();
}

ncclComm* used(ncclComm_t comm) {
    const std::lock_guard lock(living_mutex);
    if (!living_comms.contains(comm)) {
        ++misuse_count;
        return nullptr;
    }
    if (comm->looks_left > 0 || is_connecting(comm)) ++misuse_count;
    return comm;
}

ncclResult_t begun(ncclComm* comm) {
    comm->looks_left = slowness.load();
    return comm->looks_left > 0 ? ncclInProgress : ncclSuccess;
}

/// Told how many collectives its group has, and how many are before it.
using Task = std::function<void(std::size_t group, std::size_t place)>;
struct Queued {
    ncclComm* comm;
    cudaStream_t stream;
    bool is_collective;
    Connection needs;
    Task task;
};
thread_local int group_depth = 0;
thread_local std::vector<Queued> grouped;
thread_local ncclResult_t group_failure = ncclSuccess;

void connect(const Queued& call) {
    if (!connects_late) return;
    const std::lock_guard lock(call.comm->world->mutex);
    call.comm->world->connecting[call.needs].insert(call.comm->rank);
    call.comm->connecting.push_back(call.needs);
}

ncclResult_t issue(Queued call) {
    if (group_depth > 0) {
        grouped.push_back(std::move(call));
        return ncclSuccess;
    }
    ++launch_count;
    connect(call);
    gradsync_fake::enqueue(call.stream, [task = std::move(call.task)] { task(1, 0); });
    const ncclResult_t code = begun(call.comm);
    return is_connecting(call.comm) ? ncclInProgress : code;
}

std::size_t width(ncclDataType_t type) {
    switch (type) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 3)
        case ncclFloat8e4m3:
        case ncclFloat8e5m2:
#endif
        case ncclInt8:
        case ncclUint8: return 1;
        case ncclFloat16:
        case ncclBfloat16: return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32: return 4;
        default: return 8;
    }
}

gradsync::DType dtype(ncclDataType_t type) {
    using gradsync::DType;
    switch (type) {
        case ncclInt8: return DType::i8;
        case ncclUint8: return DType::u8;
        case ncclInt32: return DType::i32;
        case ncclUint32: return DType::u32;
        case ncclInt64: return DType::i64;
        case ncclUint64: return DType::u64;
        case ncclFloat16: return DType::f16;
        case ncclBfloat16: return DType::bf16;
        case ncclFloat64: return DType::f64;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 3)
        case ncclFloat8e4m3: return DType::f8e4m3;
        case ncclFloat8e5m2: return DType::f8e5m2;
#endif
        default: return DType::f32;
    }
}

std::vector<std::byte> combined(const std::vector<std::unique_ptr<Part>>& parts, std::size_t first, std::size_t count) {
    const Part& own = *parts[0];
    std::vector<std::byte> result(count * width(own.type));
    void* const out = result.data();
    std::vector<const void*> inputs;
    std::vector<double> scales;
    for (const auto& part : parts) {
        inputs.push_back(part->sent.data() + first * width(own.type));
        if (own.op == ncclNumOps) scales.push_back(part->factor);
    }
    gradsync::kernel::Reduction reduction;
    reduction.inputs = inputs;
    reduction.scales = scales;
    reduction.outputs = {&out, 1};
    reduction.count = count;
    reduction.dtype = dtype(own.type);
    using gradsync::ReduceOp;
    reduction.op = own.op == ncclMin      ? ReduceOp::min
                   : own.op == ncclMax    ? ReduceOp::max
                   : own.op == ncclProd   ? ReduceOp::product
                   : own.op == ncclNumOps ? ReduceOp::mean
                                          : ReduceOp::sum;
    reduction.factor = 1;
    gradsync::kernel::reduce(reduction);
    return result;
}

/// Done on a stream. Ranks that do not fit one another hang until they are aborted, as the real one's do.
void meet(ncclComm* comm, std::uint64_t number, Part part) {
    World& world = *comm->world;
    const std::size_t bytes = part.count * width(part.type);
    if (part.kind != Kind::broadcast || comm->rank == part.root) {
        const auto* const from = static_cast<const std::byte*>(part.in);
        part.sent.assign(from, from + bytes * (part.kind == Kind::reduce_scatter ? static_cast<std::size_t>(world.size) : 1));
    }
    if (part.scalar != nullptr)
        part.factor = part.type == ncclFloat64 ? *static_cast<const double*>(part.scalar)
                                               : static_cast<double>(*static_cast<const float*>(part.scalar));
    std::unique_lock lock(world.mutex);
    auto& place = world.meetings[number];
    if (!place) {
        place = std::make_shared<Meeting>();
        place->parts.resize(static_cast<std::size_t>(world.size));
    }
    const std::shared_ptr<Meeting> meeting = place;
    meeting->parts[static_cast<std::size_t>(comm->rank)] = std::make_unique<Part>(part);
    ++meeting->arrived;
    world.changed.notify_all();
    const auto all = static_cast<std::size_t>(world.size);
    const auto fits = [&] {
        return std::all_of(meeting->parts.begin(), meeting->parts.end(), [&](const auto& other) { return other->fits(part); });
    };
    world.changed.wait(lock, [&] { return comm->aborted || (meeting->arrived == all && fits()); });
    if (comm->aborted) return;
    lock.unlock();

    const auto& parts = meeting->parts;
    std::vector<std::byte> result;
    switch (part.kind) {
        case Kind::all_reduce: result = combined(parts, 0, part.count); break;
        case Kind::reduce:
            if (comm->rank == part.root) result = combined(parts, 0, part.count);
            break;
        case Kind::reduce_scatter: result = combined(parts, static_cast<std::size_t>(comm->rank) * part.count, part.count); break;
        case Kind::broadcast: result = parts[static_cast<std::size_t>(part.root)]->sent; break;
        case Kind::all_gather:
            for (const auto& other : parts) result.insert(result.end(), other->sent.begin(), other->sent.end());
    }

    lock.lock();
    ++meeting->computed;
    world.changed.notify_all();
    world.changed.wait(lock, [&] { return comm->aborted || meeting->computed == all; });
    if (comm->aborted) return;
    world.meetings.erase(number);
    lock.unlock();
    // As the real one does before 2.29.7 (NVIDIA/nccl#1950): of a single rank's elements the last are not written.
    if (world.size == 1 && part.scalar != nullptr && !result.empty()) result.resize(result.size() - width(part.type));
    // As in the real one, what is gathered or broadcast in place is not written by its own rank.
    auto* const out = static_cast<std::byte*>(part.out);
    const bool brings = part.kind == Kind::all_gather || (part.kind == Kind::broadcast && comm->rank == part.root);
    for (std::size_t done = 0; done < result.size(); done += bytes)
        if (!brings || out + done != part.in) std::memcpy(out + done, result.data() + done, std::min(bytes, result.size() - done));
}

/// An NCCL that does not know the 8-bit floats refuses them everywhere; one that does adds them up on some devices only.
bool refuses(ncclDataType_t type, bool reduces) {
    if (!is_float8(dtype(type))) return false;
    return version < NCCL_VERSION(2, 24, 3) || (reduces && gradsync_fake::compute_capability() < 90);
}
ncclResult_t refuse() {
    if (group_depth > 0) group_failure = ncclInvalidArgument;
    return ncclInvalidArgument;
}

ncclResult_t collective(const char* function, ncclComm_t handle, cudaStream_t stream, Part part) {
    ncclComm* const comm = used(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    if (const ncclResult_t code = refusals.take(function)) {
        if (group_depth > 0) group_failure = code;
        return code;
    }
    const bool reduces = part.kind == Kind::all_reduce || part.kind == Kind::reduce || part.kind == Kind::reduce_scatter;
    if (refuses(part.type, reduces)) return refuse();
    const std::size_t bytes = part.count * width(part.type), all = bytes * static_cast<std::size_t>(comm->world->size);
    const bool is_root = comm->rank == part.root;
    if (part.kind != Kind::broadcast || is_root)
        gradsync_fake::expect_on_device(part.in, part.kind == Kind::reduce_scatter ? all : bytes, function);
    if (part.kind != Kind::reduce || is_root)
        gradsync_fake::expect_on_device(part.out, part.kind == Kind::all_gather ? all : bytes, function);
    part.scalar = nullptr;
    if (part.op >= ncclNumOps) {
        part.scalar = comm->scalars[static_cast<std::size_t>(part.op - ncclNumOps)].first;
        part.op = ncclNumOps;
    }
    const int size_class = bytes < 16384 ? 0 : 100;  // algorithms differ
    return issue({comm,
                  stream,
                  true,
                  {static_cast<int>(part.kind) + size_class, -1, 0},
                  [comm, number = comm->next++, part](std::size_t group, std::size_t place) mutable {
                      part.group = group;
                      part.place = place;
                      meet(comm, number, part);
                  }});
}

}  // namespace

namespace gradsync_fake {

int misuses() { return misuse_count; }
int windows() { return window_count; }
void pretend(int version_, bool windows) {
    version = version_;
    has_windows = windows;
}
int launches() { return launch_count; }
void connect_late() { connects_late = true; }
void refuse_next(const std::string& function, ncclResult_t code) { refusals.plan(function, code); }
void be_slow(int looks) { slowness = looks; }

void fail_asynchronously(int size, int rank, ncclResult_t code) {
    const std::lock_guard lock(registry_mutex);
    for (auto it = registry.rbegin(); it != registry.rend(); ++it)
        if (it->second->size == size && it->second->joined == size) {
            for (ncclComm* comm : it->second->comms)
                if (comm->rank == rank) comm->error = code;
            return;
        }
}

}  // namespace gradsync_fake

extern "C" {

ncclResult_t ncclGetVersion(int* found) { return *found = version, ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t code) {
    return code == ncclSuccess       ? "no error"
           : code == ncclRemoteError ? "remote process exited or there was a network error"
                                     : "a fake error";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    const std::lock_guard lock(registry_mutex);
    std::memset(id, 0, sizeof *id);
    std::memcpy(id->internal, &next_id, sizeof next_id);
    ++next_id;
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
    if (config->blocking != 0) ++misuse_count;
    std::uint64_t number = 0;
    std::memcpy(&number, id.internal, sizeof number);
    const std::lock_guard lock(registry_mutex);
    auto& world = registry[number];
    if (!world) world = std::make_shared<World>(size);
    auto* const comm = new ncclComm;
    comm->world = world;
    comm->rank = rank;
    {
        const std::lock_guard world_lock(world->mutex);
        ++world->joined;
        world->comms.push_back(comm);
    }
    {
        const std::lock_guard living_lock(living_mutex);
        living_comms.insert(comm);
        all_comms.emplace_back(comm);
    }
    ++census().communicators;
    *handle = comm;
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* code) {
    {
        const std::lock_guard lock(living_mutex);
        if (!living_comms.contains(comm)) return ++misuse_count, ncclInvalidArgument;
    }
    bool joined;
    {
        const std::lock_guard lock(comm->world->mutex);
        joined = comm->world->joined == comm->world->size;
        if (comm->window != nullptr) {
            const auto& bytes = comm->world->windows[comm->window_calls];
            joined = joined && bytes.size() == static_cast<std::size_t>(comm->world->size);
            if (joined && comm->looks_left <= 1) {
                if (std::count(bytes.begin(), bytes.end(), bytes.front()) != comm->world->size) ++misuse_count;
                if (has_windows) {
                    *comm->window = reinterpret_cast<ncclWindow_t>(comm->window);
                    ++window_count;
                    ++comm->open_windows;
                }
                comm->window = nullptr;
            }
        }
    }
    joined = joined && !is_connecting(comm);
    if (comm->looks_left > 0) --comm->looks_left;
    *code = comm->error != ncclSuccess        ? static_cast<ncclResult_t>(comm->error.load())
            : !joined || comm->looks_left > 0 ? ncclInProgress
                                              : ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) { return *count = comm->world->size, ncclSuccess; }

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    ncclComm* const comm = used(handle);
    return comm == nullptr ? ncclInvalidArgument : begun(comm);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (used(comm) == nullptr) return ncclInvalidArgument;
    {
        const std::lock_guard lock(living_mutex);
        living_comms.erase(comm);
    }
    const std::lock_guard lock(comm->world->mutex);
    close(*comm->world);
    --census().communicators;
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    {
        const std::lock_guard lock(living_mutex);
        if (living_comms.erase(comm) == 0) return ++misuse_count, ncclInvalidArgument;
    }
    const std::lock_guard lock(comm->world->mutex);
    comm->aborted = true;
    window_count -= comm->open_windows;  // they go with it
    comm->world->changed.notify_all();
    close(*comm->world);
    --census().communicators;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective("ncclAllReduce", comm, stream, {Kind::all_reduce, in, out, count, type, op, nullptr, 0});
}
ncclResult_t ncclReduce(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                        cudaStream_t stream) {
    return collective("ncclReduce", comm, stream, {Kind::reduce, in, out, count, type, op, nullptr, root});
}
ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective("ncclBroadcast", comm, stream, {Kind::broadcast, in, out, count, type, ncclSum, nullptr, root});
}
ncclResult_t ncclReduceScatter(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
    return collective("ncclReduceScatter", comm, stream, {Kind::reduce_scatter, in, out, count, type, op, nullptr, 0});
}
ncclResult_t ncclAllGather(const void* in, void* out, std::size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return collective("ncclAllGather", comm, stream, {Kind::all_gather, in, out, count, type, ncclSum, nullptr, 0});
}
ncclResult_t ncclSend(const void* in, std::size_t count, ncclDataType_t type, int to, ncclComm_t handle, cudaStream_t stream) {
    ncclComm* const comm = used(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    if (refuses(type, false)) return refuse();
    gradsync_fake::expect_on_device(in, count * width(type), "ncclSend");
    return issue({comm, stream, false, {-1, comm->rank, to}, [=](std::size_t, std::size_t) {
                      const std::lock_guard lock(comm->world->mutex);
                      const auto* const from = static_cast<const std::byte*>(in);
                      comm->world->mail[{comm->rank, to}].emplace_back(from, from + count * width(type));
                      comm->world->changed.notify_all();
                  }});
}
ncclResult_t ncclRecv(void* out, std::size_t count, ncclDataType_t type, int from, ncclComm_t handle, cudaStream_t stream) {
    ncclComm* const comm = used(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    if (refuses(type, false)) return refuse();
    gradsync_fake::expect_on_device(out, count * width(type), "ncclRecv");
    return issue({comm, stream, false, {-1, from, comm->rank}, [=](std::size_t, std::size_t) {
                      std::unique_lock lock(comm->world->mutex);
                      auto& mail = comm->world->mail[{from, comm->rank}];
                      // One of another length hangs.
                      comm->world->changed.wait(
                          lock, [&] { return comm->aborted || (!mail.empty() && mail.front().size() == count * width(type)); });
                      if (comm->aborted) return;
                      if (!mail.front().empty()) std::memcpy(out, mail.front().data(), mail.front().size());
                      mail.pop_front();
                  }});
}

ncclResult_t ncclGroupStart() { return ++group_depth, ncclSuccess; }
ncclResult_t ncclGroupEnd() {
    if (--group_depth > 0) return ncclSuccess;
    const std::vector<Queued> calls = std::exchange(grouped, {});
    if (const ncclResult_t failure = std::exchange(group_failure, ncclSuccess)) return failure;  // and nothing of it is done
    if (const ncclResult_t code = refusals.take("ncclGroupEnd")) return code;
    std::map<std::pair<ncclComm*, cudaStream_t>, std::vector<Queued>> batches;
    for (const Queued& call : calls) {
        connect(call);
        batches[{call.comm, call.stream}].push_back(call);
    }
    ncclResult_t code = ncclSuccess;
    for (auto& [key, batch] : batches) {
        ++launch_count;
        gradsync_fake::enqueue(key.second, [batch = batch] {
            const auto is_collective = [](const Queued& call) { return call.is_collective; };
            const auto group = static_cast<std::size_t>(std::count_if(batch.begin(), batch.end(), is_collective));
            std::size_t place = 0;
            for (const Queued& call : batch) call.task(group, call.is_collective ? place++ : place);
        });
        if (begun(key.first) == ncclInProgress || is_connecting(key.first)) code = ncclInProgress;
    }
    return code;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t, ncclScalarResidence_t residence, ncclComm_t handle) {
    ncclComm* const comm = used(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    if (residence != ncclScalarDevice) ++misuse_count;
    *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(comm->scalars.size()));
    comm->scalars.emplace_back(scalar, true);
    return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclMemAlloc(void** data, std::size_t bytes) {
    return cudaMalloc(data, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* data) { return gradsync_fake::release(data), ncclSuccess; }  // unlike cudaFree it waits for nothing
ncclResult_t ncclCommRegister(ncclComm_t comm, void* data, std::size_t, void** handle) {
    if (used(comm) == nullptr) return ncclInvalidArgument;
    return *handle = data, ++census().communicators, ncclSuccess;
}
ncclResult_t ncclCommDeregister(ncclComm_t comm, void*) {
    if (used(comm) == nullptr) return ncclInvalidArgument;
    return --census().communicators, ncclSuccess;
}
/// Collective: in progress until all ranks have called; only then is the window there, if there is to be one. It returns ncclSuccess all
/// the same, as the real one does.
ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void*, std::size_t bytes, ncclWindow_t* window, int flags) {
    ncclComm* const comm = used(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    if (flags != NCCL_WIN_COLL_SYMMETRIC || version < NCCL_VERSION(2, 27, 3)) ++misuse_count;
    if (const ncclResult_t code = refusals.take("ncclCommWindowRegister")) return code;
    const std::lock_guard lock(comm->world->mutex);
    comm->world->windows[++comm->window_calls].push_back(bytes);
    comm->window = window;
    (void)begun(comm);
    return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t) {
    ncclComm* const comm = used(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    --window_count;
    --comm->open_windows;
    return begun(comm);
}

}  // extern "C"
