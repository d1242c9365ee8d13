"""What a worker does of a plan, and what the one that publishes makes of everybody's work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megtool.errors import FormatError
from megtool.plan.execute import CopyReport, PlanCopy
from megtool.plan.share import count_file_bytes, expected_file_bytes
from megtool.plan.shares import Shares, split_units
from megtool.plan.work_units import KernelUnit
from megtool.process.worker_identity import WorkerIdentity
from megtool.staging.record import FileSections, WorkerRecord
from megtool.staging.stage import Stage
from megtool.tensors.catalogue import Catalogue


def own_units(copy: PlanCopy, worker: WorkerIdentity) -> list[int]:
    """The units that a worker does, by number: all of a plan of its share."""
    if copy.plan.share is not None:
        return list(range(len(copy.units)))
    return split_units(copy.units, worker.count).of(worker.index)


def copy_share(
    copy: PlanCopy,
    stage: Stage,
    fingerprint: str,
    *,
    expected: Mapping[str, int],
    fsync: bool,
) -> WorkerRecord:
    """Copy the share of this worker into an entered stage, and sign off.

    Raises:
        DigestError: a tensor that this worker has read whole does not have its expected digest.
        SourceChangedError, StorageError: see `PlanCopy.run`.
    """
    run = stage.require_run()
    worker = run.worker
    own, share = own_units(copy, worker), copy.plan.share
    written = copy.plan.target.catalogue.files
    numbers = sorted({f for n in own for f in copy.units[n].files})
    copy.create(numbers)
    copy.run(own, resumed=stage.resumed)
    copy.compare(expected)
    context = copy.context
    units = [copy.units[n] for n in own]
    file_bytes = {} if share is None else count_file_bytes(copy.plan, context.target, units)
    record = WorkerRecord(
        fingerprint=fingerprint,
        index=worker.index,
        count=worker.count,
        num_units=len(own),
        tensors=context.digests.parts(),
        files={
            written[n].path: _sections(stage.digests.sections_of(copy.path(n)))
            if run.has_all_digests
            else None
            for n in numbers
        },
        kernel_files=tuple(
            sorted({written[u.files[0]].path for u in units if isinstance(u, KernelUnit)})
        ),
        span=None if share is None else (share.begin, share.end),
        file_bytes={written[n].path: num_bytes for n, num_bytes in sorted(file_bytes.items())},
        num_bytes=dict(context.num_bytes),
        kernel_bytes=context.kernel_bytes,
        verified=copy.verified,
        repaired=context.repaired,
        overflowed=dict(context.overflowed),
        rounded=dict(context.rounded),
        fed_overflowed=dict(context.fed_overflowed),
    )
    run.sign_off(record, [copy.path(n) for n in numbers], fsync=fsync)
    return record


def _sections(crcs: list[int] | None) -> FileSections | None:
    """The sections from the first that is not zero to the last."""
    if crcs is None:
        return None
    touched = [n for n, crc in enumerate(crcs) if crc]
    if not touched:
        return FileSections(first=0, crcs=())
    return FileSections(first=touched[0], crcs=tuple(crcs[touched[0] : touched[-1] + 1]))


def merge_shares(
    copy: PlanCopy,
    stage: Stage,
    records: Sequence[WorkerRecord],
    *,
    expected: Mapping[str, int],
) -> CopyReport:
    """Complete what the workers with these records have staged, up to the commit.

    Raises:
        DigestError: a tensor does not have its expected digest.
        FormatError: a record is not of this plan.
        SourceChangedError, StorageError: see `PlanCopy.run`.
    """
    run = stage.require_run()
    shares = None if copy.plan.share is not None else split_units(copy.units, len(records))
    written = copy.plan.target.catalogue.files
    late = [] if shares is None else sorted(shares.late)
    if shares is None:
        check_coverage(copy.plan.target.catalogue, records)
    compares_all = run.is_repeated and (run.rewrites_data or bool(late))
    for record in [] if compares_all else records:
        run.check_files(record, {file.path: file.size for file in written})
    copy.create(range(len(written)))
    copy.write_headers()
    if compares_all:
        # What an interrupted publication changed is found by comparing everything.
        everything = range(len(copy.units))
        copy.run(everything, resumed=everything)
        for n in range(len(written)):
            stage.digests.forget(copy.path(n))
        return copy.conclude(expected)
    for record in records:
        _merge_record(copy, stage, shares, record)
    copy.run(late, resumed=())
    copy.check_sources()
    return copy.conclude(expected)


def check_coverage(target: Catalogue, records: Sequence[WorkerRecord]) -> None:
    """Check that shares planned alone are all of a target: its bytes, and those of every file.

    Raises:
        FormatError: bytes are missing, or of two shares.
    """
    end = 0
    expected = expected_file_bytes(target)
    counted = dict.fromkeys((file.path for file in target.files), 0)
    for record in sorted(records, key=lambda r: r.index):
        begin = None if record.span is None else record.span[0]
        if begin != end or record.span is None or not counted.keys() >= record.file_bytes.keys():
            raise _not_of_this_plan(record, f"its share begins at byte {begin}, not {end}")
        end = record.span[1]
        for name, num_bytes in record.file_bytes.items():
            counted[name] += num_bytes
    total = int(expected.sum())
    if end != total:
        raise _not_of_this_plan(records[-1], f"the shares end at byte {end} of {total}")
    for file, num_bytes in zip(target.files, expected.tolist(), strict=True):
        if counted[file.path] != num_bytes:
            raise FormatError(
                f"the workers have written {counted[file.path]:,} bytes of tensors to this file, "
                f"which has {num_bytes:,}",
                file=file.path,
                hint=_SAME_VERSION,
            )


_SAME_VERSION = "start all workers with the same version of megtool"


def _not_of_this_plan(record: WorkerRecord, why: object) -> FormatError:
    return FormatError(
        f"the record of worker {record.index} is not of this plan: {why}", hint=_SAME_VERSION
    )


def _merge_record(
    copy: PlanCopy, stage: Stage, shares: Shares | None, record: WorkerRecord
) -> None:
    """Add what a worker did to the context of the publisher.

    Raises:
        FormatError: the record is not of this plan.
    """
    context, written = copy.context, copy.plan.target.catalogue.files
    numbers = {file.path: n for n, file in enumerate(written)}
    try:
        if shares is not None and record.num_units != len(shares.of(record.index)):
            raise ValueError(f"it has {record.num_units} units")
        for name, (linear, num_bytes) in record.tensors.items():
            context.digests.add_parts(name, linear, num_bytes)
        for name, sections in record.files.items():
            path = copy.path(numbers[name])
            if sections is None:
                stage.digests.forget(path)
            elif sections.crcs:
                stage.digests.add_sections(path, sections.first, sections.crcs)
        last = max([*record.overflowed, *record.rounded], default=0)
        if last and last >= len(copy.plan.entries):
            raise ValueError(f"there is no entry {last}")
    except (ValueError, KeyError) as e:
        raise _not_of_this_plan(record, e) from e
    copy.kernel_files.update(record.kernel_files)
    context.num_bytes.update(record.num_bytes)
    context.overflowed.update(record.overflowed)
    context.rounded.update(record.rounded)
    context.fed_overflowed.update(record.fed_overflowed)
    context.kernel_bytes += record.kernel_bytes
    context.repaired += record.repaired
    copy.verified += record.verified
