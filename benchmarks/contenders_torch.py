"""The contenders on torch (CPU), forward and backward of the head alone."""

import math

import torch
from measuring import Turns, inputs_of, number_of_cores
from torch.nn import functional as F

MARGIN, SCALE = 0.5, 64.0


def metric_learning_loss(job, w):
    """`ArcFaceLoss` of pytorch-metric-learning."""
    from pytorch_metric_learning.losses import ArcFaceLoss

    loss = ArcFaceLoss(job["classes"], job["dim"], margin=math.degrees(MARGIN), scale=SCALE)
    loss.W.data = torch.from_numpy(w).T.contiguous()
    return loss, loss.W


def insightface_loss(job, w):
    """The form of insightface's training code, written anew.

    A normalised copy of the centres; the margin is put on the targets alone, by their index.
    """
    weight = torch.nn.Parameter(torch.from_numpy(w))
    rows = torch.arange(job["batch"])

    def loss(x, y):
        cosines = F.linear(F.normalize(x), F.normalize(weight)).clamp(-1.0, 1.0)
        target = cosines[rows, y]
        sine = torch.sqrt(1.0 - target**2)
        cosines[rows, y] = target * math.cos(MARGIN) - sine * math.sin(MARGIN)
        return F.cross_entropy(cosines * SCALE, y)

    return loss, weight


LOSSES = {"torch-metric-learning": metric_learning_loss, "torch-insightface": insightface_loss}


def run(job, reply):
    torch.set_num_threads(number_of_cores())
    turns = Turns(job, reply)
    x, w, y = inputs_of(job)
    megabytes = (x.nbytes + w.nbytes + y.nbytes) / 1e6
    loss_of, weight = LOSSES[job["contender"]](job, w)
    del w  # of which a loss may have made a copy
    x, y = torch.from_numpy(x).requires_grad_(), torch.from_numpy(y).long()

    def step():
        loss = loss_of(x, y)
        loss.backward()
        x.grad = weight.grad = None
        return loss.item()

    turns.built(megabytes)
    turns.run(step)
