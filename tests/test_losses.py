"""The losses against hand-computed numbers and against slow, obvious code."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from played import Processes

from avgk_hf import AvgKConfig, AvgKForImageClassification, AvgKOutput
from avgk_hf.losses import LOSSES, Hyperparameter, Loss, make_loss
from avgk_hf.losses.avgk import choose_among_all, choose_candidates, largest
from avgk_hf.losses.base import check_labels


def make(name, k=2, num_labels=6, **hyperparameters):
    """Any loss, with what its constructor needs; ROLE for five training images."""
    loss = LOSSES[name]
    needed = {"k": k} if loss.needs_k else {}
    needed |= {"num_examples": 5, "num_labels": num_labels} if loss.per_image else {}
    return loss(**needed, **hyperparameters)


def naive_avgk(logits, sccp_logits, labels, k, alpha):
    """The formula of the paper with loops, in float64; gradients by autograd."""
    batch, num_labels = logits.shape
    log_probabilities = sccp_logits.log_softmax(1)
    cross_entropy = -sum(log_probabilities[i, labels[i]] for i in range(batch)) / batch
    entries = [
        (log_probabilities[i, j].item(), i, j) for i in range(batch) for j in range(num_labels) if j != labels[i]
    ]
    chosen = {(i, j) for _, i, j in sorted(entries, reverse=True)[: round((k - 1) * batch)]}
    rest = {(i, j) for _, i, j in entries} - chosen
    loss = cross_entropy - sum(F.logsigmoid(logits[i, labels[i]]) for i in range(batch)) / batch
    if chosen:
        loss = loss - alpha * sum(F.logsigmoid(logits[i, j]) for i, j in chosen) / len(chosen)
    if rest:
        loss = loss - alpha * sum(F.logsigmoid(-logits[i, j]) for i, j in rest) / len(rest)
    return loss


def distinct_logits(batch, num_labels, seed, dtype):
    """Logits, exact in half precision and without ties, so that the candidates are the same in every precision."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(num_labels, generator=generator) for _ in range(batch)]
    return ((torch.stack(rows) - num_labels // 2) * (8 + torch.arange(batch)[:, None]) / 32).to(dtype)


def run(loss, logits, sccp_logits, labels):
    logits = logits.clone().requires_grad_()
    sccp_logits = sccp_logits.clone().requires_grad_()
    value = loss(AvgKOutput(logits=logits, sccp_logits=sccp_logits), labels)
    value.backward()
    return value.detach(), logits.grad, sccp_logits.grad


def test_avgk_by_hand():
    """K = 2 on a 3 x 4 batch: three candidates, chosen over the whole batch and not per image."""
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    log3 = math.log(3)  # sigma(log 3) = 3/4, sigma(0) = 1/2, sigma(-log 3) = 1/4
    logits = torch.tensor([[log3, 0, 0, -log3], [0, log3, log3, 0], [0, -log3, 0, -log3]])
    labels = torch.tensor([0, 3, 1])
    # without the labels the largest probabilities are 0.7 at (2, 0), 0.3 at (1, 2), 0.25 at (0, 1); then 0.2
    half, quarter, three_quarters = -math.log(1 / 2), -math.log(1 / 4), -math.log(3 / 4)
    cross_entropy = -(math.log(0.5) + math.log(0.4) + math.log(0.1)) / 3
    of_labels = (three_quarters + half + quarter) / 3
    of_candidates = 0.5 * (half + three_quarters + half) / 3
    of_negatives = 0.5 * (half + three_quarters + half + quarter + half + three_quarters) / 6
    expected = cross_entropy + of_labels + of_candidates + of_negatives
    assert expected == pytest.approx(2.7088, abs=1e-4)

    value, grad, sccp_grad = run(LOSSES["avgk"](k=2, alpha=0.5), logits, probabilities.log(), labels)
    assert value.item() == pytest.approx(expected, abs=1e-6)
    by_hand = torch.tensor(
        [
            [-0.25 / 3, -0.5 * 0.5 / 3, 0.5 * 0.5 / 6, 0.5 * 0.25 / 6],
            [0.5 * 0.5 / 6, 0.5 * 0.75 / 6, -0.5 * 0.25 / 3, -0.5 / 3],
            [-0.5 * 0.5 / 3, -0.75 / 3, 0.5 * 0.5 / 6, 0.5 * 0.25 / 6],
        ]
    )
    assert torch.allclose(grad, by_hand, atol=1e-6)
    assert torch.allclose(sccp_grad, (probabilities - F.one_hot(labels, 4)) / 3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("k", [1, 1.5, 2, 5, 11])
@pytest.mark.parametrize("batch", [1, 6])
def test_avgk_equals_loops(dtype, k, batch):
    num_labels = 12
    for seed in range(3):
        logits = distinct_logits(batch, num_labels, seed, dtype)
        sccp_logits = distinct_logits(batch, num_labels, seed + 10, dtype)
        labels = torch.randint(0, num_labels, (batch,), generator=torch.Generator().manual_seed(seed))
        value, grad, sccp_grad = run(LOSSES["avgk"](k=k, alpha=0.7), logits, sccp_logits, labels)
        reference = [t.double().clone().requires_grad_() for t in (logits, sccp_logits)]
        expected = naive_avgk(*reference, labels, k, alpha=0.7)
        expected.backward()
        # gradients come back in the precision of the logits
        tolerance = {"atol": 1e-6, "rtol": {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 0)}
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
        assert torch.allclose(grad.double(), reference[0].grad, **tolerance)
        assert torch.allclose(sccp_grad.double(), reference[1].grad, **tolerance)


@pytest.mark.parametrize("k", [1, 1.5, 3, 6])
def test_avgk_with_equal_logits(k):
    """Everything ties: exactly the asked number of candidates is taken, and the loss does not depend on which."""
    zeros, labels = torch.zeros(5, 7), torch.tensor([0, 1, 2, 3, 6])
    value, grad, _ = run(LOSSES["avgk"](k=k, alpha=2.0), zeros, zeros, labels)
    groups = 1 + 2.0 * (k > 1) + 2.0
    assert value.item() == pytest.approx(math.log(7) + groups * math.log(2), rel=1e-6)
    num_candidates = round((k - 1) * 5)
    assert (grad < 0).sum().item() == 5 + num_candidates
    first = choose_candidates(zeros.log_softmax(1), labels, num_candidates)
    assert len(set(first.tolist())) == num_candidates
    assert torch.equal(first, choose_candidates(zeros.log_softmax(1), labels, num_candidates))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [30.0, 100.0, 1e4])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_avgk_is_finite_for_huge_logits(dtype, size, k):
    signs = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).sign()
    labels = torch.tensor([0, 1, 2, 3])
    for logits, sccp_logits in ((signs, -signs), (signs, torch.ones_like(signs)), (-signs, signs)):
        value, grad, sccp_grad = run(
            LOSSES["avgk"](k=k), (size * logits).to(dtype), (size * sccp_logits).to(dtype), labels
        )
        assert all(torch.isfinite(t).all() for t in (value, grad, sccp_grad))


def test_candidates_are_kept_apart_where_probabilities_underflow():
    sccp_logits = torch.tensor([[200.0, 0.0, 1.0, -1.0, 2.0]])
    labels = torch.tensor([0])
    assert set(choose_candidates(sccp_logits.log_softmax(1), labels, 2).tolist()) == {4, 2}


@pytest.mark.parametrize("name", LOSSES)
def test_bad_labels_are_refused(name):
    loss = make(name)
    outputs = AvgKOutput(logits=torch.randn(3, 4), sccp_logits=torch.randn(3, 4))
    for wrong, remedy in ((-100, "A negative label"), (-1, "A negative label"), (4, "Check the label column")):
        with pytest.raises(ValueError, match=rf"a label lies outside \[0, 4\).*: {wrong}\. {remedy}"):
            loss(outputs, torch.tensor([0, wrong, 1]))
    with pytest.raises(ValueError, match="mixup"):
        loss(outputs, torch.rand(3, 4))


def naive_an(logits, labels):
    batch, num_labels = logits.shape
    total = 0
    for i in range(batch):
        for j in range(num_labels):
            positive = j == labels[i]
            total = total - (
                F.logsigmoid(logits[i, j]) if positive else F.logsigmoid(-logits[i, j]) / (num_labels - 1)
            )
    return total / batch


def naive_epr(logits, labels, k, beta):
    batch, num_labels = logits.shape
    expected = sum(torch.sigmoid(logits[i, j]) for i in range(batch) for j in range(num_labels)) / batch
    return -sum(F.logsigmoid(logits[i, labels[i]]) for i in range(batch)) / batch + beta * (expected - k) ** 2


def naive_role(logits, theta, labels, k, role_lambda):
    def one_side(own, other):
        total = naive_epr(own, labels, k, role_lambda)
        for i in range(own.shape[0]):
            for j in range(own.shape[1]):
                target = torch.sigmoid(other[i, j]).detach()
                cross = target * F.logsigmoid(own[i, j]) + (1 - target) * F.logsigmoid(-own[i, j])
                total = total - cross / own.shape[0]
        return total

    return (one_side(logits, theta) + one_side(theta, logits)) / 2


BATCH = torch.tensor([0, 3, 3, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["an", "epr"])
def test_an_and_epr_equal_loops(name, dtype):
    for seed in range(4):
        logits = (3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).to(dtype).requires_grad_()
        loss = make(name, k=2.5) if name == "an" else make(name, k=2.5, beta=0.3)
        value = loss(AvgKOutput(logits=logits), BATCH)
        value.backward()
        reference = logits.detach().double().requires_grad_()
        expected = naive_an(reference, BATCH) if name == "an" else naive_epr(reference, BATCH, 2.5, 0.3)
        expected.backward()
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
        tolerance = {"atol": 1e-5, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
        assert torch.allclose(logits.grad.double(), reference.grad, **tolerance)


@pytest.mark.parametrize("role_lambda", [0.0, 0.2])
def test_role_equals_loops(role_lambda):
    loss = make("role", k=2.5, role_lambda=role_lambda)
    index = torch.tensor([4, 0, 2, 1])
    for step in range(3):
        logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).requires_grad_()
        theta = loss.theta.detach().clone()
        if step == 0:  # an observed label starts at 0.995, the others near 0.5
            assert (theta.sigmoid() - 0.5).abs().max() <= 0.1 + 1e-6
            theta[index, BATCH] = math.log(0.995 / 0.005)
        loss.theta.grad = None
        value = loss(AvgKOutput(logits=logits), BATCH, index)
        value.backward()
        reference, rows = logits.detach().double().requires_grad_(), theta[index].double().requires_grad_()
        expected = naive_role(reference, rows, BATCH, 2.5, role_lambda)
        expected.backward()
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
        assert torch.allclose(logits.grad.double(), reference.grad, atol=1e-5)
        assert torch.allclose(loss.theta.grad[index].double(), rows.grad, atol=1e-5)
        assert loss.theta.grad[3].abs().max() == 0  # the image that is not in the batch
        with torch.no_grad():
            loss.theta -= 0.5 * loss.theta.grad
    assert loss.seen.tolist() == [True, True, True, False, True]


def test_role_without_index_is_epr():
    logits = torch.randn(4, 6)
    with torch.no_grad():
        value = make("role", role_lambda=0.2)(AvgKOutput(logits=logits), BATCH)
        assert make("role", role_lambda=0.2)(AvgKOutput(logits=logits), BATCH, torch.arange(4)) == value
    assert value.item() == pytest.approx(naive_epr(logits, BATCH, 2, 0.2).item(), rel=1e-5)
    assert make("role", role_lambda=0.2)(AvgKOutput(logits=logits), BATCH) == value
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=r"an index lies outside \[0, 5\)"):
            make("role")(AvgKOutput(logits=logits), BATCH, torch.tensor([0, 1, 2, wrong]))


@pytest.mark.parametrize("name", LOSSES)
def test_double_precision_stays(name):
    logits = torch.randn(4, 6, dtype=torch.float64)
    value = make(name)(AvgKOutput(logits=logits, sccp_logits=logits), BATCH, torch.arange(4))
    assert value.dtype == torch.float64


@pytest.mark.parametrize("name", LOSSES)
def test_everything_is_made_on_the_device_of_the_logits(name):
    """The meta device computes nothing, and refuses what lies on another, as an accelerator does."""
    with torch.device("meta"):
        loss, logits = make(name), torch.zeros(4, 6, requires_grad=True)
        labels, index = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    value = loss(AvgKOutput(logits=logits, sccp_logits=logits), labels, index)
    value.backward()
    assert value.device.type == logits.grad.device.type == "meta"
    if name == "avgk":
        assert choose_among_all(logits.detach()[0], 2).device.type == "meta"


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("epsilon", [0.0, 0.2, 1.0])
def test_topk_equals_pytopk(k, epsilon):
    pytopk = pytest.importorskip("pytopk.functional")
    from pytopk.noised_topk import _noised_topk

    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        logits = (2 * torch.randn(4, 6, generator=generator)).requires_grad_()
        noise = torch.randn(4, 6, 5, generator=generator)
        value = make("topk", k=k, epsilon=epsilon)(AvgKOutput(logits=logits), BATCH, noise=noise)
        value.backward()
        theirs = logits.detach().clone().requires_grad_()
        expected = pytopk.bal_noised_topk_loss(theirs, BATCH, k, epsilon, _noised_topk, noise)
        expected.backward()
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)
        assert torch.allclose(logits.grad, theirs.grad, atol=1e-6)


def test_topk_draws_new_noise_each_time():
    outputs = AvgKOutput(logits=torch.randn(4, 6))
    loss = make("topk", epsilon=1.0)
    torch.manual_seed(0)
    first, second = loss(outputs, BATCH), loss(outputs, BATCH)
    torch.manual_seed(0)
    assert first != second and loss(outputs, BATCH) == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_draws_noise_for_every_score_and_sample(dtype):
    logits = torch.randn(4, 6, dtype=dtype)
    torch.manual_seed(0)
    value = make("topk")(AvgKOutput(logits=logits), BATCH)
    torch.manual_seed(0)
    assert value == make("topk")(AvgKOutput(logits=logits), BATCH, noise=torch.randn(4, 6, 5, dtype=dtype))
    assert make("topk", epsilon=0.0)(AvgKOutput(logits=torch.zeros(4, 6)), BATCH) == 1
    with pytest.raises(ValueError, match=r"k=6 must be a number in \[1, 6\) for 6 classes"):
        make("topk", k=6)(AvgKOutput(logits=logits), BATCH)


def test_role_starts_with_estimates_on_both_sides_of_a_half():
    estimates = LOSSES["role"](k=2, num_examples=100, num_labels=6).theta.sigmoid()
    assert 0.4 - 1e-6 <= estimates.min() < 0.45 and 0.55 < estimates.max() <= 0.6 + 1e-6
    with pytest.raises(ValueError, match=r"k=6 must be a number in \[1, 6\)"):
        LOSSES["role"](k=6, num_examples=5, num_labels=6)


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck(name):
    loss = make(name, k=2.5, num_labels=5).double()
    labels, index = torch.tensor([0, 3, 2]), torch.tensor([4, 0, 1])
    extra = {"noise": torch.randn(3, 5, 5, dtype=torch.float64)} if name == "topk" else {}
    logits, sccp_logits = (distinct_logits(3, 5, seed, torch.float64).requires_grad_() for seed in (0, 1))
    if name == "role":  # each side for itself: what it is compared with is held fixed
        theta = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda z: loss._side(z, theta.detach(), labels), (logits,))
        assert torch.autograd.gradcheck(lambda t: loss._side(t, logits.detach(), labels), (theta,))
        return
    assert torch.autograd.gradcheck(
        lambda z, z2: loss(AvgKOutput(logits=z, sccp_logits=z2), labels, index, **extra) + 0 * z2.sum(),
        (logits, sccp_logits),
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "avgk"])
def test_baselines_are_finite_for_huge_logits(name):
    signs = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).sign()
    for logits in (1e4 * signs, -1e4 * signs):
        logits.requires_grad_()
        value = make(name)(AvgKOutput(logits=logits), BATCH, torch.tensor([0, 1, 2, 3]))
        value.backward()
        assert torch.isfinite(value) and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("name", "field"), [("epr", "beta"), ("topk", "epsilon"), ("role", "role_lambda"), ("role", "theta_lr")]
)
def test_bad_hyperparameters_are_refused(name, field):
    with pytest.raises(ValueError, match=f"{field}=-1"):
        make(name, **{field: -1})


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_computes_in_float32(name):
    loss = make(name)
    features, head = torch.randn(4, 8), torch.nn.Linear(8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(features)
        value = loss(AvgKOutput(logits=logits, sccp_logits=logits), torch.tensor([0, 1, 2, 5]), torch.arange(4))
    assert logits.dtype == torch.bfloat16 and value.dtype == torch.float32
    value.backward()
    assert torch.isfinite(head.weight.grad).all()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("name", "k"), [("avgk", 1), ("avgk", 2.5), ("avgk", 5), ("epr", 2.5), ("role", 2.5)])
def test_two_processes_train_as_one(name, k, ties, monkeypatch):
    """Mean losses and gradients are those of one process with the images of both; AVG-K's candidates too."""
    generator = torch.Generator().manual_seed(3)
    logits, sccp_logits = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
    if ties:
        sccp_logits = sccp_logits.clamp(-0.2, 0.2)
    sccp_logits[:4] += 3 * torch.eye(6, dtype=torch.float64)[0]  # one process has far more of the candidates
    labels, index = torch.tensor([0, 3, 3, 5, 1, 2, 0, 4]), torch.tensor([5, 0, 7, 2, 6, 1, 3, 4])
    given = {"avgk": {"alpha": 0.7}, "epr": {"beta": 0.3}, "role": {"role_lambda": 0.2}}[name]
    if name == "role":
        given |= {"num_examples": 9, "num_labels": 6}
    loss = LOSSES[name](k=k, **given).double()

    def work(rank):
        """The part of one process, or all of it."""
        part = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
        own, inputs = copy.deepcopy(loss), [t[part].clone().requires_grad_() for t in (logits, sccp_logits)]
        value = own(AvgKOutput(logits=inputs[0], sccp_logits=inputs[1]), labels[part], index[part])
        value.backward()
        with torch.no_grad():  # nobody waits for the others in an evaluation
            if rank != 1:
                own(AvgKOutput(logits=inputs[0], sccp_logits=inputs[1]), labels[part])
        grads = [t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs]
        return value.item(), grads, [p.grad for p in own.parameters()], [b.clone() for b in own.buffers()]

    whole, parts = work(None), Processes(monkeypatch).run(work)
    assert sum(value for value, *_ in parts) / 2 == pytest.approx(whole[0], rel=1e-9)
    for i in range(2):
        assert torch.allclose(torch.cat([grads[i] for _, grads, *_ in parts]) / 2, whole[1][i], rtol=0, atol=1e-9)
    for _, _, grads, buffers in parts:  # of what every process has a copy of
        assert all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(grads, whole[2], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(buffers, whole[3], strict=True))


def test_local_candidates_are_those_of_each_process(monkeypatch):
    logits, sccp_logits = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([0, 3, 3, 5, 1, 2, 0, 4])
    loss = LOSSES["avgk"](k=2.5, alpha=0.7, candidate_scope="local")
    work = [
        lambda part=part: run(loss, logits[part], sccp_logits[part], labels[part]) for part in (slice(4), slice(4, 8))
    ]
    alone = [of_part() for of_part in work]
    together = Processes(monkeypatch).run(lambda rank: work[rank]())
    assert all(
        torch.equal(a, b) for ours, one in zip(together, alone, strict=True) for a, b in zip(ours, one, strict=True)
    )


def test_a_loss_is_made_from_the_config():
    """Every hyperparameter of every loss comes from the config, whose own they are."""
    given = {"avgk": {"alpha": 0.1, "candidate_scope": "local"}, "epr": {"beta": 0.2}, "topk": {"epsilon": 0.3}}
    given |= {"role": {"role_lambda": 0.4, "theta_lr": 0.5}, "ce": {}, "an": {}}
    for name, kind in LOSSES.items():
        assert set(kind.hyperparameters) == set(given[name])
        config = AvgKConfig(objective=name, k=2, num_labels=6, **given[name])
        assert config.hyperparameters == given[name]
        loss = make_loss(config, num_examples=5)
        assert type(loss) is kind and getattr(loss, "k", None) == (2 if kind.needs_k else None)
        assert {field: getattr(loss, field) for field in given[name]} == given[name]
        assert bool(loss.state_dict()) == kind.has_state and bool(kind.memory(5, 6, 0)) == kind.per_image
    assert loss.num_samples == 5  # of the top-K loss, where the config has no such field
    config = AvgKConfig(objective="role", k=2, num_labels=6)
    assert make_loss(config, 5).theta.shape == (5, 6)
    assert make_loss(config, 5).learning_rate_factor == config.hyperparameters["theta_lr"] == 1
    with pytest.raises(ValueError, match=r"objective='role' keeps state for every training image"):
        make_loss(config)
    config.objective = "hinge"
    with pytest.raises(ValueError, match=r"^objective='hinge' is unknown; choose one of \['ce', "):
        make_loss(config)
    assert {name for name, kind in LOSSES.items() if kind.two_heads} == {"avgk"}
    assert {name for name, kind in LOSSES.items() if not kind.needs_k} == {"ce", "an"}
    with pytest.raises(ValueError, match="k=2: CrossEntropyLoss does not depend on k"):
        LOSSES["ce"](k=2)
    with pytest.raises(ValueError, match=r"beta is no hyperparameter of AvgKLoss. It has alpha, candidate_scope."):
        LOSSES["avgk"](k=2, beta=1)
    with pytest.raises(ValueError, match=r"aplha is no hyperparameter of AvgKLoss. Did you mean 'alpha'?"):
        LOSSES["avgk"](k=2, aplha=1)


def test_the_defaults_of_the_losses():
    assert LOSSES["avgk"](k=2).alpha == 1 and LOSSES["avgk"](k=2).candidate_scope == "global"
    assert LOSSES["epr"](k=2).beta == 0.01
    assert (LOSSES["topk"](k=2.9).epsilon, LOSSES["topk"](k=2.9).num_samples, LOSSES["topk"](k=2.9).k) == (1, 5, 2)
    role = LOSSES["role"](2, 5, 6)
    assert (role.role_lambda, role.theta_lr, role.memory(3, 5, 7)) == (0, 1, 3 * 5 * 4 * 9)
    with pytest.raises(ValueError, match="candidate_scope='world' is unknown"):
        LOSSES["avgk"](k=2, candidate_scope="world")


@pytest.mark.parametrize("logits", [[0.5], torch.zeros(6), torch.zeros(3, 6, 1), torch.zeros(0, 6), torch.zeros(3, 0)])
def test_logits_that_are_no_matrix_are_refused(logits):
    is_tensor = isinstance(logits, torch.Tensor)
    found = rf"shape \({', '.join(map(str, logits.shape))},?\) and type torch.float32" if is_tensor else ".*list"
    with pytest.raises(ValueError, match=rf"logits of {found}.*: expected a floating point tensor"):
        check_labels(torch.zeros(3, dtype=torch.int64), logits)


def test_labels_of_another_type_are_refused():
    logits = torch.zeros(3, 6)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool):
        with pytest.raises(ValueError, match=r"expected one class id .* int64, e.g. `labels.long\(\)`"):
            check_labels(torch.zeros(3, dtype=dtype), logits)
    for labels in (torch.zeros(3), torch.zeros(4, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="expected one class id"):
            check_labels(labels, logits)
    with pytest.raises(ValueError, match="labels of type list for 3 images"):
        check_labels([0, 1, 2], logits)
    with pytest.raises(ValueError, match="expected a floating point tensor"):
        check_labels(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 6, dtype=torch.int64))
    check_labels(torch.tensor([0, 5, 2]), logits)


def test_labels_are_checked_without_waiting(monkeypatch):
    """What is compiled, or runs on an accelerator, asserts the range asynchronously."""
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    check_labels(torch.tensor([0, 5, 2]), torch.zeros(3, 6))
    for wrong in (-1, 6):
        with pytest.raises(RuntimeError, match=r"a label lies outside \[0, 6\), the 6 classes of the model"):
            check_labels(torch.tensor([0, wrong, 2]), torch.zeros(3, 6))


def test_a_weight_is_a_finite_number_from_zero():
    alpha = LOSSES["avgk"].hyperparameters["alpha"]
    assert [alpha.check("alpha", value) for value in (0, 0.5, 1e30)] == [0, 0.5, 1e30]
    for value in (-1e-9, math.inf, math.nan, "1", True, None):
        with pytest.raises(ValueError, match=r"alpha=.* must be a finite number >= 0, e.g. 1.0"):
            alpha.check("alpha", value)
    gamma = Hyperparameter(2, "From one to three.", least=1, most=3)
    assert [gamma.check("gamma", value) for value in (1, 1.5, 3)] == [1, 1.5, 3]
    for value in (0.99, 3.01, math.inf):
        with pytest.raises(ValueError, match=r"gamma=.* must be a finite number in \[1, 3\], e.g. 2"):
            gamma.check("gamma", value)


@pytest.mark.parametrize("num_labels", [1, 2, 3])
def test_few_classes(num_labels):
    """With one there are no negatives, and nothing is divided by 0."""
    logits = torch.tensor([[0.5, 2.0, -0.3], [-1.0, 0.1, 0.7]])[:, :num_labels]
    positive, negative = math.log1p(math.exp(-0.5)) + math.log1p(math.exp(1)), F.softplus(logits[:, 1:]).sum().item()
    value = LOSSES["an"]()(AvgKOutput(logits=logits), torch.tensor([0, 0]))
    assert value.item() == pytest.approx((positive + negative / max(num_labels - 1, 1)) / 2, rel=1e-6)


def test_backward_twice_with_retained_graph():
    logits = torch.randn(4, 6, requires_grad=True)
    value = LOSSES["avgk"](k=2)(AvgKOutput(logits=logits, sccp_logits=logits), torch.tensor([0, 1, 2, 5]))
    (first,) = torch.autograd.grad(value, logits, retain_graph=True)
    (second,) = torch.autograd.grad(value, logits)
    assert torch.equal(first, second)


def test_avgk_refuses_what_it_cannot_do():
    outputs = AvgKOutput(logits=torch.randn(3, 4), sccp_logits=torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"k=4 must be a number in \[1, 4\)"):
        LOSSES["avgk"](k=4)(outputs, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"k=0.5 must be a number from 1 to below"):
        LOSSES["avgk"](k=0.5)
    with pytest.raises(ValueError, match="alpha=-1"):
        LOSSES["avgk"](k=2, alpha=-1)
    with pytest.raises(ValueError, match=r"sccp_logits of type NoneType .* AvgKLoss needs the scores of two heads"):
        LOSSES["avgk"](k=2)(AvgKOutput(logits=torch.randn(3, 4)), torch.tensor([0, 1, 2]))
    outputs = AvgKOutput(logits=torch.randn(3, 4), sccp_logits=torch.randn(3, 5))
    with pytest.raises(ValueError, match=r"sccp_logits of shape \(3, 5\) .* beside logits of shape \(3, 4\)"):
        LOSSES["avgk"](k=2)(outputs, torch.tensor([0, 1, 2]))


def test_what_a_class_states_it_gets(monkeypatch):
    """A loss from outside with two heads and a row for every image; its model has both heads."""

    class Both(Loss):
        two_heads = per_image = True

        def __init__(self, k, num_examples, num_labels):
            super().__init__(k)
            self.shape = (num_examples, num_labels)

        def compute(self, logits, labels, sccp_logits, index):
            assert logits.dtype == sccp_logits.dtype == torch.float32
            return (logits - sccp_logits)[index, labels].sum() + self.k

    monkeypatch.setitem(LOSSES, "both", Both)
    model = AvgKForImageClassification.from_timm("test_vit", 6, image_size=32, objective="both", k=2)
    loss, labels = make_loss(model.config, num_examples=9), torch.tensor([1, 0])
    assert model.sccp_head is not None and loss.shape == (9, 6) and Both.memory(9, 6, 1) == 9 * 6 * 4 * 3
    outputs = AvgKOutput(logits=torch.ones(2, 6).half(), sccp_logits=torch.zeros(2, 6).half())
    assert loss(outputs, labels, index=torch.tensor([1, 0])) == 4
    with pytest.raises(ValueError, match=r"k=2 must be a number in \[1, 2\) for 2 classes"):
        loss(AvgKOutput(logits=torch.ones(2, 2), sccp_logits=torch.ones(2, 2)), labels)


def test_a_class_that_states_too_little_is_refused(monkeypatch):
    """Its author hears it at once, and not when a checkpoint is incomplete."""

    class Forgetful(Loss):
        needs_k = False

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

    monkeypatch.setitem(LOSSES, "forgetful", Forgetful)
    with pytest.raises(ValueError, match="Forgetful has parameters or buffers: state `has_state = True` in its class"):
        make_loss(AvgKConfig(objective="forgetful", num_labels=6))


@pytest.mark.parametrize("values", ["random", "ties", "constant", "ascending", "descending"])
@pytest.mark.parametrize("size", [9_999, 10_000, 40_007])
def test_largest_equals_sorting(values, size, monkeypatch):
    """Below 10,000 values, and above it with few and with many to choose, each branch is exact; first come first."""
    data = torch.randn(size, generator=torch.Generator().manual_seed(size))
    if values == "ties":
        data = data.round(decimals=1)
    elif values == "constant":
        data.fill_(-2.5)
    elif values in ("ascending", "descending"):
        data = data.sort(descending=values == "descending").values
    data[7] = -math.inf  # a label
    for count in (0, 1, 2, 300, size // 32, size // 3, size - 1):
        chosen = largest(data.clone(), count)
        array = data.numpy()
        first = np.lexsort([np.arange(size), -array])[:count]  # the largest, of equal ones the first
        assert sorted(chosen.tolist()) == sorted(first.tolist())
        assert torch.equal(chosen, largest(data.clone(), count))
        with monkeypatch.context() as patch:  # what is compiled, or runs on an accelerator, sorts
            patch.setattr("torch.compiler.is_compiling", lambda: True)
            assert largest(data.clone(), count).tolist() == first.tolist()
