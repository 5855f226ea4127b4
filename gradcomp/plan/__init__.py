"""Planner: predict whether compression pays, and on how many nodes, from a cost model and a
simulated training step, and recommend a method.

The command line is ``python -m gradcomp.plan --model vgg16 --link 1gbit --nodes 1:64``.
"""

from gradcomp import interrupt

interrupt.begin()

from gradcomp.plan.costs import HIERARCHICAL, METHODS, LocalSteps, Method, find_method
from gradcomp.plan.links import Link, Node, parse_link
from gradcomp.plan.models import Model, find_model, own_model
from gradcomp.plan.nodes import optimal_nodes
from gradcomp.plan.predict import Crossing, Prediction, Row, predict
from gradcomp.plan.rates import Rates, StageRate, calibrate
from gradcomp.plan.step import simulate
from gradcomp.plan.workload import Simulation, Stragglers, Transport, Workload

__all__ = [
    "HIERARCHICAL",
    "METHODS",
    "Crossing",
    "Link",
    "LocalSteps",
    "Method",
    "Model",
    "Node",
    "Prediction",
    "Rates",
    "Row",
    "Simulation",
    "StageRate",
    "Stragglers",
    "Transport",
    "Workload",
    "calibrate",
    "find_method",
    "find_model",
    "optimal_nodes",
    "own_model",
    "parse_link",
    "predict",
    "simulate",
]
