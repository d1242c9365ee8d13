"""Every family on the emulated GPU: logits, loss, gradients and graphed decoding as on the CPU.

python -m tests.support.emulated.families LIBRARY KERNELS [NAME ...]

It prints a line of JSON for each model and type: its name, whether its steps were graphs, and what
went wrong, if anything.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tests.support.emulated.device import start

start(Path(sys.argv[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from megtool.convert.families.detection import family  # noqa: E402
from megtool.inference.cuda_graph import SPARE_SLOTS, GraphedStep  # noqa: E402
from megtool.inference.forward import Forward  # noqa: E402
from megtool.kernels.dispatch import use  # noqa: E402
from megtool.kernels.graphs.cuda_graphs import CudaGraphs  # noqa: E402
from megtool.model.batch import Batch  # noqa: E402
from megtool.model.stacks.decoder import Decoder  # noqa: E402
from megtool.options.kernels import Implementation  # noqa: E402
from megtool.parallel.process_groups import ProcessGroups  # noqa: E402
from megtool.spec import layer_sets  # noqa: E402
from megtool.spec.model_config import ModelConfig  # noqa: E402
from tests.support.models import dense_decoders as dense  # noqa: E402
from tests.support.models import moe_models  # noqa: E402
from tests.support.models.tiny_model import tiny_config  # noqa: E402

ROWS, LENGTH, NEW = 2, 12, 3


def configs() -> Iterator[tuple[str, ModelConfig]]:
    """A name and a tiny configuration for every case of the tests of families."""
    for case in dense.CASES:
        yield str(case), family(case.family).read_config(case.config().to_dict())
    for name, (kind, _, keys) in moe_models.CASES.items():
        config = tiny_config(kind, sizes=moe_models.SIZES, **keys)
        yield name, family(kind).read_config(config.to_dict())


def both(config: ModelConfig, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """The same random model on the CPU and on the GPU."""
    torch.manual_seed(0)
    here = Decoder(config, device="cpu", dtype=dtype).eval()
    with torch.no_grad():
        for p in here.parameters():
            p.copy_(0.2 * torch.randn(p.shape) + (p.dim() == 1))
    there = Decoder(config, ProcessGroups.alone("cuda"), device="cuda", dtype=dtype).eval()
    there.load_state_dict(here.state_dict())
    return here, there


def close(there: Tensor, here: Tensor, tolerance: float) -> None:
    """Fail where they differ; a `tolerance` of 0 is for numbers that routers make jump."""
    assert there.is_cuda
    assert not there.isnan().any()
    if tolerance:
        torch.testing.assert_close(there.cpu(), here, rtol=tolerance, atol=tolerance)


def train(here: Decoder, there: Decoder, tokens: Tensor, tolerance: float) -> None:
    """Loss of packed documents, and gradients, also of a graph."""
    documents = torch.arange(LENGTH).expand(ROWS, LENGTH) // 6
    labels = tokens.clone()
    labels[:, :3] = -100
    on_gpu = Batch(tokens_BS=tokens.cuda(), documents_BS=documents.cuda())
    ours, _ = there.loss(on_gpu, labels.cuda())
    theirs, _ = here.loss(Batch(tokens_BS=tokens, documents_BS=documents), labels)
    ours.backward()  # type: ignore[no-untyped-call]
    theirs.backward()  # type: ignore[no-untyped-call]
    close(ours.detach(), theirs.detach(), tolerance)
    for p, q in zip(there.parameters(), here.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            close(p.grad, q.grad, 10 * tolerance)
    if not layer_sets.moe_layers(there.config):
        replay(there, on_gpu, labels.cuda())


def replay(there: Decoder, batch: Batch, labels: Tensor) -> None:
    """The same there and back as a graph, twice: gradients add up to twice what they were."""
    learned = [p for p in there.parameters() if p.grad is not None]
    expected = [p.grad.clone() for p in learned if p.grad is not None]

    def both_ways(tokens: Tensor, documents: Tensor, wanted: Tensor) -> Tensor:
        loss, _ = there.loss(Batch(tokens_BS=tokens, documents_BS=documents), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def forget() -> None:
        for p in learned:
            assert p.grad is not None
            p.grad.zero_()

    forget()
    graphs = CudaGraphs(both_ways, undo=forget)
    for _ in range(2):
        graphs(batch.tokens_BS, batch.documents_BS, labels)
    for p, was in zip(learned, expected, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, was + was)


@torch.inference_mode()
def decode(here: Decoder, there: Decoder, tokens: Tensor, valid: Tensor, tolerance: float) -> bool:
    """Prompts padded on the left, and some more tokens; as graphs where they can be."""
    cpu, gpu = Forward(here), Forward(there)
    sizes = {"num_rows": ROWS, "max_tokens": LENGTH + NEW + SPARE_SLOTS}
    kept = cpu.rows_cache(**sizes, graphable=False)
    kept_there = gpu.rows_cache(**sizes, graphable=gpu.is_graphable)
    step = GraphedStep(gpu, kept_there) if gpu.is_graphable else None
    theirs = cpu.last_logits(Batch(tokens_BS=tokens, valid_BS=valid), kept)
    ours = gpu.last_logits(Batch(tokens_BS=tokens.cuda(), valid_BS=valid.cuda()), kept_there)
    for _ in range(NEW):
        assert ours is not None
        assert theirs is not None
        close(ours, theirs, tolerance)
        new = theirs.argmax(-1, keepdim=True)
        theirs = cpu.last_logits(Batch(tokens_BS=new), kept)
        if step is not None:
            ours = step(new.cuda())
        else:
            ours = gpu.last_logits(Batch(tokens_BS=new.cuda()), kept_there)
    assert step is None or step.num_replays == NEW
    return step is not None


def compare(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Everything of one model; whether its steps were graphs."""
    here, there = both(config, dtype)
    tolerance = 2e-3 if dtype == torch.float32 else 0.0
    tokens = torch.randint(1, 100, (ROWS, LENGTH))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[0, :4] = False
    with torch.no_grad():
        theirs = here(Batch(tokens_BS=tokens, valid_BS=valid))
        ours = there(Batch(tokens_BS=tokens.cuda(), valid_BS=valid.cuda()))
    close(ours[valid.cuda()], theirs[valid], tolerance)
    train(here, there, tokens, tolerance)
    return decode(here, there, tokens, valid, tolerance)


def main(kernels: Implementation, names: list[str]) -> None:
    """Compare all models, or those whose names begin so."""
    torch.set_num_threads(1)
    for name, config in configs():
        if names and not name.startswith(tuple(names)):
            continue
        for dtype in (torch.float32, torch.bfloat16):
            told: dict[str, Any] = {"name": name, "dtype": str(dtype), "error": None}
            try:
                with use(kernels):
                    told["graphed"] = compare(config, dtype)
            except Exception:
                told["error"] = traceback.format_exc()
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(cast(Implementation, sys.argv[2]), sys.argv[3:])
