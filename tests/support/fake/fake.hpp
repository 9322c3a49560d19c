// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>

/// A CUDA runtime and an NCCL of our own, linked in place of the real ones, so that what drives them can be tested where there is no
/// device: "device" memory is the host's, a stream is a thread that does one thing after another, ranks are threads, each with a device of
/// its own. What they do is right and slow. What a real NCCL cannot be asked for they do too: hang, fail, be slow.

namespace gradsync_fake {

/// Does `work` when all that was put on the stream before is done.
void enqueue(cudaStream_t stream, std::function<void()> work);

/// Aborts unless all of this memory lies in one block on the device: the real ones may crash, or stop the device.
void expect_on_device(const void* data, std::size_t bytes, const char* what);

/// While it lives, this memory of the host counts as one block on the device. It must lie in none yet. Neighbours are blocks of their own.
class OnDevice {
public:
    OnDevice(const void* data, std::size_t bytes);
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    ~OnDevice();

private:
    std::size_t number_;
};

/// What exists now: streams, events, blocks of memory, communicators. 0 at the end, or something leaks.
int living();
/// "2 streams, 1 event"
std::string describe_living();

/// Calls that NCCL forbids: on a communicator whose last call is in progress, or after it was destroyed.
int misuses();

/// From now on a call of NCCL is in progress for so many looks.
void be_slow(int looks);

/// From now on ranks connect at their first small and their first large collective of each kind. The call is in progress until all ranks have
/// made theirs. The real NCCL does that once per algorithm, unless NCCL_RUNTIME_CONNECT is 0.
void connect_late();

/// The communicator of rank `rank` of the newest world that has as many ranks fails asynchronously.
void fail_asynchronously(int size, int rank, ncclResult_t code);

/// The next call of this function of NCCL's fails so; once.
void refuse_next(const std::string& function, ncclResult_t code);

/// From now on NCCL says that it is this version, and gives windows, or none.
void pretend(int version, bool windows);

/// From now on all devices are of this compute capability, 90 for 9.0, which is what they are otherwise.
void be_of_capability(int capability);
int compute_capability();

/// Windows of communicators that are open.
int windows();

/// What NCCL has put on streams so far: a group is one launch, of several collectives.
int launches();

/// From now on a copy from the host to the device takes so much longer.
void upload_slowly(std::chrono::milliseconds pause);

/// From now on the next call of the runtime with this name fails so; once.
void fail_next(const std::string& call, cudaError_t code);

/// While it lives, whatever comes to a stream after it waits: a device that computes.
class Busy {
public:
    explicit Busy(cudaStream_t stream);
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;
    ~Busy();

private:
    std::function<void()> release_;
};

}  // namespace gradsync_fake
