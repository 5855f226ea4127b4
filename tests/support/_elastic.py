"""A coordinator and sites that are threads, for tests of `gradcomp.local.ElasticDiLoCo`."""

import contextlib
import copy
import threading
import time

import torch
from _models import bits, sgd, train
from torch import nn

from gradcomp.local import Coordinator, ElasticDiLoCo

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 5))
SIZES = {"features": 40, "classes": 5}
H = 3
WAIT_S = 180


def fresh(dtype=torch.float32):
    torch.set_num_threads(1)  # it counts for the calling thread
    return copy.deepcopy(MODEL).to(dtype)


class Run:
    """A coordinator, and sites that are threads."""

    def __init__(self, **options):
        self.options = {
            "host": "127.0.0.1",
            "sync_timeout_s": 20,
            "min_sites_timeout_s": 60,
            **options,
        }
        self.coordinator = Coordinator(port=0, **self.options)
        self.port = self.coordinator.port

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def site(self, name, *, model=None, codec="onebit", kind=ElasticDiLoCo, **options):
        """Join: return a model, its optimizer and its local steps."""
        model = fresh() if model is None else model
        optimizer = sgd(model)
        options = {"min_numel": 0, "timeout_s": 10.0, "sync_every": H, **options}
        local = kind(model, optimizer, codec, coordinator=self.address, name=name, **options)
        return model, optimizer, local

    @contextlib.contextmanager
    def joined(self, name, **options):
        """Yield what `site` returns; the site leaves in the end."""
        model, optimizer, local = self.site(name, **options)
        with contextlib.closing(local):
            yield model, optimizer, local

    def alike(self, names, body):
        """Return what ``body(name)`` returns at each site: the same, or None at some of them."""
        first, *others = (one for one in self.each(names, body).values() if one is not None)
        assert all(one == first for one in others), (first, others)
        return first

    def each(self, names, body, wait_s=WAIT_S):
        """Return ``body(name)`` of each site, all at once; the first error is raised."""
        found, errors = {}, []

        def work(name):
            try:
                found[name] = body(name)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(wait_s)
            assert not thread.is_alive(), "a site hangs"
        if errors:
            raise errors[0]
        return found

    def until_joined(self):
        """Wait until the first sync has counted."""
        end = time.monotonic() + WAIT_S
        while self.coordinator._state.newest < 0:
            assert time.monotonic() < end
            time.sleep(0.01)

    def until_arrived(self, name):
        """Wait until a site waits for a sync."""
        arrived, end = self.coordinator._state.arrived, time.monotonic() + WAIT_S
        while not any(one.name == name for one in list(arrived.values())):
            assert time.monotonic() < end, name
            time.sleep(0.01)

    def restart(self):
        self.coordinator.close()
        self.coordinator = Coordinator(port=self.port, store_port=0, **self.options)


def steps(model, optimizer, local, numbers, seed):
    for number in numbers:
        train(model, optimizer, seed, [number], **SIZES)
        local.step()


def changed(model, local, value):
    """A round in which the site's training moves every weight by -value."""
    with torch.no_grad():
        for p in model.parameters():
            p -= value
    for _ in range(H):
        local.step()


def zeros():
    model = fresh()
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def everywhere(model, value):
    for p in model.parameters():
        torch.testing.assert_close(p.detach(), torch.full_like(p, value), rtol=1e-6, atol=0)
    return True


def undisturbed(sites):
    """Return the outcome of three syncs of three sites."""

    def site(name):
        with sites.joined(name) as (model, optimizer, local):
            steps(model, optimizer, local, range(3 * H), "abc".index(name))
            return outcome(local)

    return sites.alike("abc", site)


def outcome(local):
    """Return what must be the same bits on all sites after a sync."""
    state = local._fragments[0].shared_state()
    momenta = [t for one in state["outer"]["state"].values() for t in one.values() if t is not None]
    return state["syncs"], bits(state["anchors"].values()), bits(momenta)


# averages in fp32, and an outer step that moves the anchors by them
PLAIN = {"codec": "identity", "outer_optimizer": lambda anchors: torch.optim.SGD(anchors, lr=1.0)}
