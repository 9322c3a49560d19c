// SPDX-License-Identifier: BSL-1.0
// gradsync for Python's torch.nn.Module, over TCP and shared memory. train.py uses it.
//
//     import gradsync_torch as gs
//     comm = gs.Comm()                                  # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//     sync = gs.Reducer(comm, model)                    # as DistributedDataParallel
//     sharded = gs.ShardedOptimizer(comm, model)        # as ZeroRedundancyOptimizer, with gradients sharded, too
//     sharded = gs.FullyShard(comm, model, ["block"])   # as fully_shard

#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/interop/torch_reducer.hpp>
#include <gradsync/interop/torch_sharded.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace gs = gradsync;
namespace py = pybind11;

namespace {

using Comm = gs::TcpBackend;
using Reducer = gs::TorchReducer<Comm>;
using ShardedOptimizer = gs::TorchShardedOptimizer<Comm, gs::ExternalOptimizer, gs::Zero2>;
using FullyShard = gs::TorchFullyShard<Comm, gs::ExternalOptimizer>;
using Unlocked = py::call_guard<py::gil_scoped_release>;  // other threads of Python run while a rank waits

gs::TorchParameters parameters_of(const py::object& module) {
    return {py::list(module.attr("named_parameters")()).cast<std::vector<std::pair<std::string, at::Tensor>>>(),
            py::list(module.attr("buffers")()).cast<std::vector<at::Tensor>>()};
}

template <class Face, class... More>
std::shared_ptr<Face> make(const Comm& comm, const py::object& module, const More&... more) {
    const gs::TorchParameters parameters = parameters_of(module);
    const py::gil_scoped_release unlocked;
    return std::make_shared<Face>(comm, parameters, more...);
}

/// Python's hooks run before and after the forward of each unit. They do nothing once `sharded` is gone.
void hook(const std::shared_ptr<FullyShard>& sharded, const py::object& module, const std::vector<std::string>& units) {
    for (std::size_t k = 0; k < units.size(); ++k) {
        const py::object unit = module.attr("get_submodule")(units[k]);
        unit.attr("register_forward_pre_hook")(py::cpp_function([weak = std::weak_ptr(sharded), k](const py::args&) {
            const auto live = weak.lock();
            const py::gil_scoped_release unlocked;
            if (live) live->enter(k);
        }));
        unit.attr("register_forward_hook")(py::cpp_function([weak = std::weak_ptr(sharded), k](py::object, py::object, py::object result) {
            const auto live = weak.lock();
            const auto leave = [&](py::handle h) { return py::cast(live->leave(k, h.cast<at::Tensor>())); };
            if (!live) return result;
            if (!py::isinstance<py::tuple>(result)) return py::object(leave(result));
            py::list results;
            for (const py::handle h : result) results.append(THPVariable_Check(h.ptr()) ? leave(h) : py::reinterpret_borrow<py::object>(h));
            return py::object(py::tuple(results));
        }));
    }
}

template <class Sharded, class Class>
void define_sharding(Class& face) {
    face.def("finish", &Sharded::finish, Unlocked(), "Reduces the gradients: shards()[i].grad is then this rank's slice of the average.")
        .def(
            "clip_grad_norm_", [](Sharded& s, double most) { return s.clip_gradients_by_norm(most); }, Unlocked(),
            "Returns the norm before.")
        .def("stepped", &Sharded::stepped, Unlocked(), "Call it when an optimizer has stepped shards(): all ranks get the weights.")
        .def(
            "shards", [](const Sharded& s) { return s.shards(); },
            "This rank's slices of the parameters, flat, in f32, as long as this object lives: for optimizers that work element by element.")
        .def(
            "broadcast_buffers", [](Sharded& s) { s.broadcast_buffers(); }, Unlocked())
        .def("state_dict", &Sharded::state_dict, py::arg("root") = py::none(), Unlocked(), "Whole master weights by name, on all ranks.")
        .def("load_state_dict", &Sharded::load_state_dict, py::arg("state"), py::arg("root") = 0, Unlocked())
        .def("memory", [](const Sharded& s) {
            const gs::ShardMemory m = s.memory();
            return py::dict(py::arg("parameters") = m.parameters, py::arg("gradients") = m.gradients,
                            py::arg("master_weights") = m.master_weights);
        });
}

}  // namespace

PYBIND11_MODULE(gradsync_torch, m) {
    py::module_::import("torch");
    py::class_<Comm>(m, "Comm")
        .def(py::init([] { return Comm::from_environment(); }), Unlocked())
        .def_property_readonly("rank", [](const Comm& c) { return c.rank(); })
        .def_property_readonly("size", [](const Comm& c) { return c.size(); })
        .def(
            "barrier", [](Comm& c) { c.barrier().wait(); }, Unlocked());

    py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
        .def(py::init(&make<Reducer>))
        .def(
            "broadcast_parameters", [](Reducer& r) { r.broadcast_parameters(); }, Unlocked(), "Every rank gets rank 0's.")
        .def(
            "broadcast_buffers", [](Reducer& r) { r.broadcast_buffers(); }, Unlocked())
        .def("average_buffers", &Reducer::average_buffers, Unlocked(), "Call it before an evaluation or a checkpoint.")
        .def("finish", &Reducer::finish, Unlocked(), "Averages the gradients over the ranks. Call it after backward().")
        .def(
            "clip_grad_norm_", [](Reducer& r, double most) { return r.clip_gradients_by_norm(most); }, Unlocked());

    py::class_<ShardedOptimizer, std::shared_ptr<ShardedOptimizer>> optimizer(m, "ShardedOptimizer");
    optimizer.def(
        py::init([](const Comm& comm, const py::object& module) { return make<ShardedOptimizer>(comm, module, gs::ExternalOptimizer{}); }));
    define_sharding<ShardedOptimizer>(optimizer);

    py::class_<FullyShard, std::shared_ptr<FullyShard>> fully(m, "FullyShard");
    fully.def(py::init([](const Comm& comm, const py::object& module, const std::vector<std::string>& units) {
        auto sharded = make<FullyShard>(comm, module, gs::ExternalOptimizer{}, units);
        hook(sharded, module, units);
        return sharded;
    }));
    define_sharding<FullyShard>(fully);
}
