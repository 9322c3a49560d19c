// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <nvtx3/nvToolsExt.h>

#include <array>
#include <vector>

#include "../core/unique_handle.hpp"
#include "../observe/observer.hpp"

/// @file
/// The steps of a Reducer as ranges in NVIDIA's tools.

namespace gradsync::inline v0_2 {

namespace detail {

inline void destroy_nvtx_domain(nvtxDomainHandle_t domain) noexcept { nvtxDomainDestroy(domain); }

}  // namespace detail

/// Shows the work of a Reducer in Nsight Systems and other NVTX tools, as this rank sees it. The domain "gradsync" has
/// a mark for each gradient that becomes ready, ranges for the threads that launch, copy, wait and finish, and a range
/// for each bucket in flight. It costs next to nothing while no tool is attached.
///
///     gs::NvtxObserver nvtx;
///     gs::Reducer<gs::NcclBackend> sync(comm, parameters, {.observer = &nvtx});
///
/// Needs the NVTX headers, which come with CUDA. There is nothing to link.
class NvtxObserver final : public Observer {
public:
    NvtxObserver() : domain_(nvtxDomainCreateA("gradsync")) {}

    void plan(const BucketPlan& plan, std::span<const std::size_t> bytes,
              std::span<const std::string_view> names) override {
        for (std::size_t a = 0; a < activity_count; ++a) {
            const auto activity = static_cast<Activity>(a);
            Labels& labels = labels_[a];
            labels.by_index.clear();
            labels.other = std::string(name_of(activity));
            if (activity == Activity::copy) {
                for (const std::string_view name : names) labels.by_index.push_back(detail::text(activity, " ", name));
            } else if (activity != Activity::progress && activity != Activity::finish) {
                for (std::size_t b = 0; b < plan.size(); ++b)
                    labels.by_index.push_back(detail::text(activity, " bucket ", b, " (", bytes[b], " bytes)"));
            }
        }
        ready_.other = "ready";
        ready_.by_index.clear();
        for (const std::string_view name : names) ready_.by_index.push_back(detail::text("ready ", name));
        for (auto& ranges : ranges_) ranges.assign(plan.size(), 0);
    }

    /// See Observer.
    void ready(std::size_t parameter, Time) noexcept override {
        const nvtxEventAttributes_t attributes = attributes_of(ready_.of(parameter));
        nvtxDomainMarkEx(domain_.get(), &attributes);
    }
    void begin(Activity activity, std::size_t index, Time) noexcept override {
        if (activity == Activity::progress) return;  // reported only when it is over
        const nvtxEventAttributes_t attributes = attributes_of(labels_[static_cast<std::size_t>(activity)].of(index));
        if (nvtxRangeId_t* const range = range_of(activity, index))
            *range = nvtxDomainRangeStartEx(domain_.get(), &attributes);
        else nvtxDomainRangePushEx(domain_.get(), &attributes);
    }
    /// See Observer.
    void end(Activity activity, std::size_t index, Time) noexcept override {
        if (activity == Activity::progress) return;
        if (nvtxRangeId_t* const range = range_of(activity, index)) nvtxDomainRangeEnd(domain_.get(), *range);
        else nvtxDomainRangePop(domain_.get());
    }

private:
    struct Labels {
        std::vector<std::string> by_index;
        std::string other;

        const char* of(std::size_t index) const noexcept {
            return (index < by_index.size() ? by_index[index] : other).c_str();
        }
    };

    /// The stored range of an activity that may end on another thread; null for other activities.
    nvtxRangeId_t* range_of(Activity activity, std::size_t index) noexcept {
        if (activity != Activity::collective && activity != Activity::gather) return nullptr;
        auto& ranges = ranges_[activity == Activity::gather];
        return index < ranges.size() ? &ranges[index] : nullptr;
    }

    static nvtxEventAttributes_t attributes_of(const char* text) noexcept {
        nvtxEventAttributes_t attributes{};
        attributes.version = NVTX_VERSION;
        attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
        attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
        attributes.message.ascii = text;
        return attributes;
    }

    UniqueHandle<nvtxDomainHandle_t, detail::destroy_nvtx_domain> domain_;
    std::array<Labels, activity_count> labels_;
    Labels ready_;
    std::array<std::vector<nvtxRangeId_t>, 2> ranges_;  ///< for collectives and gathers, by bucket
};

}  // namespace gradsync::inline v0_2
