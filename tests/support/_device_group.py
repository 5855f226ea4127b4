"""A process group for tensors of an accelerator and no others, as NCCL is for CUDA's."""

import torch
import torch.distributed as dist


class DeviceGroup(dist.ProcessGroup):
    """Collectives of copies over gloo; CPU tensors are refused."""

    takes_cpu = False

    def __init__(self, options, _=None):
        super().__init__(options.group_rank, options.group_size)
        store, self._name = options.store, options.group_id
        self._gloo = dist.ProcessGroupGloo(store, self.rank(), self.size(), options.timeout)

    def getGroupName(self):
        return self._name

    def _run(self, call, outputs, inputs):
        is_of_cpu = any(one.is_cpu for one in outputs + inputs)
        assert self.takes_cpu or not is_of_cpu, "not for CPU tensors"
        there, given = [one.cpu() for one in outputs], [one.cpu() for one in inputs]
        call(there, given).wait()
        for output, host in zip(outputs, there, strict=True):
            output.copy_(host)
        future = torch.futures.Future()
        future.set_result(outputs)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def broadcast(self, tensors, options):
        return self._run(lambda out, _: self._gloo.broadcast(out, options), tensors, [])

    def allreduce(self, tensors, options):
        return self._run(lambda out, _: self._gloo.allreduce(out, options), tensors, [])

    def allgather(self, outputs, inputs, options=None):
        return self._run(lambda out, given: self._gloo.allgather([out], given), *outputs, inputs)

    def all_gather_single(self, output, given, options=None):
        return self._run(
            lambda out, one: self._gloo._allgather_base(out[0], one[0]), [output], [given]
        )

    def reduce_scatter_single(self, output, given, options):
        return self._run(
            lambda out, one: self._gloo._reduce_scatter_base(out[0], one[0], options),
            [output],
            [given],
        )

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


class SharedGroup(DeviceGroup):
    """The same for tensors of the CPU, too, as gloo is for CUDA's."""

    takes_cpu = True

    def barrier(self, opts):
        return self._gloo.barrier(opts)


def register_group(name, device, group=DeviceGroup):
    dist.Backend.register_backend(name, group, extended_api=True, devices=[device])
