// SPDX-License-Identifier: BSL-1.0
#include "fake.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "census.hpp"
#include "planned_failures.hpp"

namespace {

using gradsync_fake::census;

/// Something that happens once.
class Happening {
public:
    void happen() {
        const std::lock_guard lock(mutex_);
        happened_ = true;
        at_ = std::chrono::steady_clock::now();
        changed_.notify_all();
    }
    std::chrono::steady_clock::time_point at() {
        const std::lock_guard lock(mutex_);
        return at_;
    }
    bool happened() {
        const std::lock_guard lock(mutex_);
        return happened_;
    }
    void await() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return happened_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool happened_ = false;
    std::chrono::steady_clock::time_point at_;
};

class Worker {
public:
    void put(std::function<void()> work) {
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(work));
        changed_.notify_one();
    }
    bool idle() {
        const std::lock_guard lock(mutex_);
        return queue_.empty() && !working_;
    }
    bool over() {
        const std::lock_guard lock(mutex_);
        return closed_ && queue_.empty() && !working_;
    }
    void await_idle() {
        std::unique_lock lock(mutex_);
        done_.wait(lock, [&] { return queue_.empty() && !working_; });
    }
    void close() {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        changed_.notify_one();
    }
    /// Goes on after close() until all is done.
    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
            if (queue_.empty()) return;
            auto work = std::move(queue_.front());
            queue_.pop_front();
            working_ = true;
            lock.unlock();
            work();
            work = nullptr;
            lock.lock();
            working_ = false;
            done_.notify_all();
        }
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_, done_;
    std::deque<std::function<void()>> queue_;
    bool working_ = false, closed_ = false;
};

std::shared_ptr<Worker> new_worker() {
    auto worker = std::make_shared<Worker>();
    std::thread([worker] { worker->run(); }).detach();
    return worker;
}

/// Every thread has a default stream of its own.
struct DefaultStream {
    std::shared_ptr<Worker> worker = new_worker();
    ~DefaultStream() { worker->close(); }
};

gradsync_fake::PlannedFailures<cudaError_t> failures;
std::atomic<std::chrono::milliseconds> upload_pause{std::chrono::milliseconds(0)};

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

struct CUstream_st {
    std::shared_ptr<Worker> worker = new_worker();
};

struct CUevent_st {
    std::mutex mutex;
    std::shared_ptr<Happening> recorded;
};

namespace {

/// The streams that exist.
std::mutex streams_mutex;
auto& streams = *new std::set<cudaStream_t>;  // for as long as there are threads

/// Aborts if the stream was destroyed; the real runtime may crash.
void check_exists(cudaStream_t stream) {
    const std::lock_guard lock(streams_mutex);
    if (streams.contains(stream)) return;
    std::fputs("a stream was used after its destruction\n", stderr);
    std::abort();
}

Worker& worker_of(cudaStream_t stream) {
    thread_local DefaultStream own;
    if (stream == nullptr) return *own.worker;
    check_exists(stream);
    return *stream->worker;
}

/// Every rank is a thread: the streams that it has made are its device. Those that are destroyed may still have work.
thread_local std::vector<std::shared_ptr<Worker>> own_streams;

void await_device() {
    for (const auto& stream : own_streams) stream->await_idle();
    worker_of(nullptr).await_idle();
}

cudaError_t finish(cudaStream_t stream) {
    Happening over;
    worker_of(stream).put([&] { over.happen(); });
    over.await();
    return cudaSuccess;
}

/// Blocks of memory that the runtime has given out, by their ends.
struct Block {
    const std::byte* begin;
    bool on_device;
    std::size_t number;
};
std::mutex blocks_mutex;
auto& blocks = *new std::map<const std::byte*, Block>;  // for as long as there are threads

/// Returns the number of the block. It replaces stale blocks at the same addresses.
std::size_t remember(const void* data, std::size_t bytes, bool on_device) {
    static std::size_t blocks_so_far = 0;
    const auto* const begin = static_cast<const std::byte*>(data);
    const std::lock_guard lock(blocks_mutex);
    for (auto other = blocks.upper_bound(begin); other != blocks.end() && other->second.begin < begin + bytes;) other = blocks.erase(other);
    blocks[begin + bytes] = {begin, on_device, ++blocks_so_far};
    return blocks_so_far;
}
template <class T>
cudaError_t allocate(T** data, std::size_t bytes, bool on_device) {
    *data = std::aligned_alloc(256, (bytes + 256) / 256 * 256);
    if (*data != nullptr) std::memset(*data, 0xa5, bytes);
    ++census().memories;
    remember(*data, bytes, on_device);
    return cudaSuccess;
}
void forget(auto is_it) {
    const std::lock_guard lock(blocks_mutex);
    std::erase_if(blocks, [&](const auto& block) { return is_it(block.second); });
}
/// Does all of this memory lie in a block on the device (or else, of page-locked memory of the host)?
bool is_of_runtime(const void* data, std::size_t bytes, bool on_device) {
    if (bytes == 0) return true;
    const auto* const begin = static_cast<const std::byte*>(data);
    const std::lock_guard lock(blocks_mutex);
    const auto block = blocks.lower_bound(begin + bytes);
    return block != blocks.end() && block->second.begin <= begin && block->second.on_device == on_device;
}

}  // namespace

namespace gradsync_fake {

void enqueue(cudaStream_t stream, std::function<void()> work) { worker_of(stream).put(std::move(work)); }

void expect_on_device(const void* data, std::size_t bytes, const char* what) {
    if (is_of_runtime(data, bytes, true)) return;
    std::fprintf(stderr, "%s is given %zu bytes at %p, which are not all in one block on the device\n", what, bytes, data);
    std::abort();
}

OnDevice::OnDevice(const void* data, std::size_t bytes) : number_(remember(data, bytes, true)) {}
OnDevice::~OnDevice() {
    forget([this](const Block& block) { return block.number == number_; });
}

void upload_slowly(std::chrono::milliseconds pause) { upload_pause = pause; }

void fail_next(const std::string& call, cudaError_t code) { failures.plan(call, code); }

void release(void* data) {
    if (data != nullptr) {
        --census().memories;
        forget([&](const Block& block) { return block.begin == data; });
    }
    std::free(data);
}

Census& census() {
    static Census only;
    return only;
}

int living() { return census().streams + census().events + census().memories + census().communicators; }

std::string describe_living() {
    return std::to_string(census().streams) + " streams, " + std::to_string(census().events) + " events, " +
           std::to_string(census().memories) + " blocks of memory, " + std::to_string(census().communicators) + " communicators";
}

namespace {
std::atomic<int> capability{90};
}
void be_of_capability(int value) { capability = value; }
int compute_capability() { return capability; }

Busy::Busy(cudaStream_t stream) {
    auto over = std::make_shared<Happening>();
    enqueue(stream, [over] { over->await(); });
    release_ = [over] { over->happen(); };
}
Busy::~Busy() { release_(); }

}  // namespace gradsync_fake

extern "C" {

const char* cudaGetErrorString(cudaError_t code) {
    return code == cudaSuccess ? "no error" : code == cudaErrorMemoryAllocation ? "out of memory" : "a fake error";
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    if (attribute == cudaDevAttrComputeCapabilityMajor) return *value = gradsync_fake::compute_capability() / 10, cudaSuccess;
    if (attribute == cudaDevAttrComputeCapabilityMinor) return *value = gradsync_fake::compute_capability() % 10, cudaSuccess;
    return cudaErrorNotSupported;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
    if (const cudaError_t code = failures.take("cudaMalloc")) return code;
    return allocate(data, bytes, true);
}
cudaError_t cudaFree(void* data) {
    if (data != nullptr) await_device();
    return gradsync_fake::release(data), cudaSuccess;
}
cudaError_t cudaMallocHost(void** data, std::size_t bytes) { return allocate(data, bytes, false); }
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }

/// For pageable memory the real one may wait for the stream, before the copy or after it. This one does.
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (const cudaError_t code = failures.take("cudaMemcpyAsync")) return code;
    const bool up = kind == cudaMemcpyHostToDevice, down = kind == cudaMemcpyDeviceToHost;
    if ((!down && !is_of_runtime(to, bytes, true)) || (!up && !is_of_runtime(from, bytes, true))) return cudaErrorInvalidValue;
    worker_of(stream).put([=] {
        if (up) std::this_thread::sleep_for(upload_pause.load());
        std::memmove(to, from, bytes);
    });
    const bool waits = (up && !is_of_runtime(from, bytes, false)) || (down && !is_of_runtime(to, bytes, false));
    return waits ? finish(stream) : cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
    worker_of(nullptr).put([=] { std::memmove(to, from, bytes); });
    return finish(nullptr);
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
    worker_of(stream).put([=] { std::memset(data, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
    cudaMemsetAsync(data, value, bytes, nullptr);
    return finish(nullptr);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    *stream = new CUstream_st;
    {
        const std::lock_guard lock(streams_mutex);
        streams.insert(*stream);
    }
    std::erase_if(own_streams, [](const auto& known) { return known->over(); });
    own_streams.push_back((*stream)->worker);
    ++census().streams;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    check_exists(stream);
    {
        const std::lock_guard lock(streams_mutex);
        streams.erase(stream);
    }
    stream->worker->close();
    --census().streams;
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return last_error = worker_of(stream).idle() ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return finish(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    std::shared_ptr<Happening> recorded;
    {
        const std::lock_guard lock(event->mutex);
        recorded = event->recorded;
    }
    if (recorded) worker_of(stream).put([recorded] { recorded->await(); });
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CUevent_st;
    ++census().events;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    --census().events;
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (const cudaError_t code = failures.take("cudaEventRecord")) return code;
    auto recorded = std::make_shared<Happening>();
    {
        const std::lock_guard lock(event->mutex);
        event->recorded = recorded;
    }
    worker_of(stream).put([recorded] { recorded->happen(); });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    std::shared_ptr<Happening> recorded;
    {
        const std::lock_guard lock(event->mutex);
        recorded = event->recorded;
    }
    if (recorded) recorded->await();
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (const cudaError_t code = failures.take("cudaEventQuery")) return code;
    const std::lock_guard lock(event->mutex);
    return last_error = !event->recorded || event->recorded->happened() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    for (const cudaEvent_t event : {from, to})
        if (cudaEventQuery(event) != cudaSuccess || !event->recorded) return cudaErrorInvalidResourceHandle;
    *milliseconds = std::chrono::duration<float, std::milli>(to->recorded->at() - from->recorded->at()).count();
    return cudaSuccess;
}
// Of queries only: whether the real one remembers those is not documented.
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

}  // extern "C"
