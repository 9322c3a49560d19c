// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES CUDA::nvtx3
// What a tool hears: this program is the tool, too, by NVTX's way in for one that is linked statically. No device is needed.
#include <gradsync/interop/nvtx.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// All that was heard, of all threads.
struct Tool {
    std::mutex mutex;
    std::string domain;
    std::vector<std::string> marks, started;
    std::map<nvtxRangeId_t, int> open;                           ///< by range: started, but not ended
    std::map<std::thread::id, std::vector<std::string>> pushed;  ///< by thread
    std::size_t popped = 0;
    std::string complaint;
} tool;

int domain_of_gradsync = 0;

nvtxDomainHandle_t NVTX_API domain_create(const char* name) {
    std::lock_guard lock(tool.mutex);
    tool.domain = name;
    return reinterpret_cast<nvtxDomainHandle_t>(&domain_of_gradsync);
}
void NVTX_API mark(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
    std::lock_guard lock(tool.mutex);
    tool.marks.emplace_back(event->message.ascii);
}
nvtxRangeId_t NVTX_API range_start(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
    std::lock_guard lock(tool.mutex);
    tool.started.emplace_back(event->message.ascii);
    const nvtxRangeId_t id = tool.started.size();
    tool.open[id] = 1;
    return id;
}
void NVTX_API range_end(nvtxDomainHandle_t, nvtxRangeId_t id) {
    std::lock_guard lock(tool.mutex);
    if (tool.open.erase(id) == 0) tool.complaint = "a range ends that is not open";
}
int NVTX_API range_push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
    std::lock_guard lock(tool.mutex);
    tool.pushed[std::this_thread::get_id()].emplace_back(event->message.ascii);
    return 0;
}
int NVTX_API range_pop(nvtxDomainHandle_t) {
    std::lock_guard lock(tool.mutex);
    auto& pushed = tool.pushed[std::this_thread::get_id()];
    if (pushed.empty()) tool.complaint = "a thread pops what it has not pushed";
    else pushed.pop_back();
    ++tool.popped;
    return 0;
}

template <class F>
void listen(NvtxFunctionTable table, unsigned size, unsigned id, F* function) {
    if (id < size) *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

int NVTX_API inject(NvtxGetExportTableFunc_t get_export_table) {
    const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
    NvtxFunctionTable table = nullptr;
    unsigned size = 0;
    if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
    listen(table, size, NVTX_CBID_CORE2_DomainCreateA, domain_create);
    listen(table, size, NVTX_CBID_CORE2_DomainMarkEx, mark);
    listen(table, size, NVTX_CBID_CORE2_DomainRangeStartEx, range_start);
    listen(table, size, NVTX_CBID_CORE2_DomainRangeEnd, range_end);
    listen(table, size, NVTX_CBID_CORE2_DomainRangePushEx, range_push);
    listen(table, size, NVTX_CBID_CORE2_DomainRangePop, range_pop);
    return 1;
}

std::size_t count(const std::vector<std::string>& texts, const std::string& text) {
    std::size_t n = 0;
    for (const std::string& t : texts) n += t == text;
    return n;
}

/// Before the first call of NVTX, which looks there.
const bool injected = (InitializeInjectionNvtx2_fnptr = inject) != nullptr;

}  // namespace

TEST_CASE("a tool hears of marks, and of ranges that end") {
    REQUIRE(injected);
    { const NvtxObserver first; }  // NVTX sets itself up in its first call, and not in a way that the thread sanitizer knows to be safe
    constexpr int ranks = 2, steps = 3;
    CHECK(findings(ranks, [](ThreadBackend comm, Finding&) {
              auto model = tensors({1000, 20, 30'000});
              NvtxObserver nvtx;
              Reducer<ThreadBackend, PerParameter> sync(comm, model, {.observer = &nvtx});
              for (int step = 0; step < steps; ++step) {
                  backward(sync, model, comm.rank(), step);
                  sync.finish();
              }
          }) == "");
    std::lock_guard lock(tool.mutex);
    CHECK(tool.domain == "gradsync");
    CHECK(tool.marks.size() == 3 * ranks * steps);
    CHECK(count(tool.marks, "ready p1") == ranks * steps);
    CHECK(tool.started.size() == 3 * ranks * steps);
    CHECK(count(tool.started, "collective bucket 0 (120000 bytes)") == ranks * steps);
    CHECK(tool.open.empty());
    for (const auto& [thread, pushed] : tool.pushed) CHECK(pushed.empty());
    CHECK(tool.popped >= ranks * steps);  // of finish() alone
    CHECK(tool.complaint == "");
}

TEST_CASE("a bucket that the observer was not told of has ranges, too") {
    NvtxObserver nvtx;
    nvtx.begin(Activity::collective, 7, {});
    nvtx.end(Activity::collective, 7, {});
    std::lock_guard lock(tool.mutex);
    CHECK(tool.complaint == "");
}
