"""The driver: the function that every thread of a team runs, with its share of all parameters laid end to end.

It is compiled once, for all updates. In Python, with `jobs` as `jobs.py` lays them out in memory::

    def share(context, t, threads):
        save the mode of the floating-point unit, and set the default: to nearest, subnormals kept, no traps
        low, high = total * t // threads, total * (t + 1) // threads         # in steps of the kernels' loops
        for job in jobs:
            a, z = max(low - job.before, 0), min(high - job.before, job.steps)
            if a < z:
                full = job.elements // kernel.step                             # steps without the end of the tensor
                if a < min(z, full):
                    kernel.code(job.row, job.scalars, a * step, min(z, full) * step, 0, all, measures)
                if z > full:
                    copy the last elements of each tensor to a buffer, which is otherwise 0
                    kernel.code(the buffer's row, job.scalars, 0, step, full * step, the number of those, measures)
                    copy them back to the tensors that the kernel writes
        restore the mode
"""

from __future__ import annotations

JOB = ("kernel", "row", "scalars", "elements", "before", "steps", "measures")
"""The 64-bit numbers that describe a job, one update of one parameter.

`kernel`, `row` (of the tensors' addresses) and `scalars` are addresses; `before` are the steps of all jobs before it;
`measures` is where its measurements begin, in doubles.
"""

KERNEL = ("code", "step", "slots")
"""The 64-bit numbers that describe a kernel; then for each slot the bytes of its words, and 1 if they are written."""

CONTEXT = ("jobs", "total", "measures", "stride", "table")
"""The 64-bit numbers that describe a step: how many jobs, their steps, an address of measurements with the doubles of
each thread, and the address of the first job."""

_MXCSR_SAVED = """
  call void @llvm.x86.sse.stmxcsr(ptr %mode)
  %plain = alloca i32
  store i32 8064, ptr %plain
  call void @llvm.x86.sse.ldmxcsr(ptr %plain)"""  # 8064, 0x1F80: all exceptions masked, to nearest, no FTZ, no DAZ

_FPCR_SAVED = """
  %fpcr = call i64 @llvm.aarch64.get.fpcr()
  store i64 %fpcr, ptr %mode
  call void @llvm.aarch64.set.fpcr(i64 0)"""  # 0 is all of that

_FPCR_RESTORED = """
  %saved = load i64, ptr %mode
  call void @llvm.aarch64.set.fpcr(i64 %saved)"""

MODES = {
    "x86_64": (
        "declare void @llvm.x86.sse.stmxcsr(ptr)\ndeclare void @llvm.x86.sse.ldmxcsr(ptr)",
        _MXCSR_SAVED,
        "call void @llvm.x86.sse.ldmxcsr(ptr %mode)",
    ),
    "aarch64": (
        "declare i64 @llvm.aarch64.get.fpcr()\ndeclare void @llvm.aarch64.set.fpcr(i64)",
        _FPCR_SAVED,
        _FPCR_RESTORED,
    ),
}
"""For each architecture the declarations, and how the floating-point mode is saved and set, and restored."""


def write_driver(architecture: str) -> str:
    """The text of `share`, `team` and what they call."""
    declared, enter, leave = MODES[architecture]
    return "\n".join([_DECLARED, declared, _TEAM, _share(enter, leave), _RUN, _TAIL])


def _fields(names: tuple[str, ...], base: str) -> str:
    """Loads the numbers that describe a job or a step."""
    return "\n".join(
        f"  %{name}_at = getelementptr i64, ptr {base}, i64 {i}\n  %{name} = load i64, ptr %{name}_at"
        for i, name in enumerate(names)
    )


_DECLARED = """
declare i32 @collage_thread()
declare i32 @collage_threads()
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
"""

# How many threads there are is asked inside: a team may be smaller than what was asked for.
_TEAM = """
define void @team(ptr %context) {
  %number = call i32 @collage_thread()
  %many = call i32 @collage_threads()
  %t = sext i32 %number to i64
  %threads = sext i32 %many to i64
  call void @share(ptr %context, i64 %t, i64 %threads)
  ret void
}
"""


def _share(enter: str, leave: str) -> str:
    return f"""
define void @share(ptr %context, i64 %t, i64 %threads) {{
entry:
  %mode = alloca i64
  {enter}
{_fields(CONTEXT, "%context")}
  %first = mul i64 %total, %t
  %low = sdiv i64 %first, %threads
  %after = add i64 %t, 1
  %last = mul i64 %total, %after
  %high = sdiv i64 %last, %threads
  %own = mul i64 %stride, %t
  %measures_ptr = inttoptr i64 %measures to ptr
  %mine = getelementptr double, ptr %measures_ptr, i64 %own
  %table_ptr = inttoptr i64 %table to ptr
  br label %test
test:
  %j = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %j, %jobs
  br i1 %more, label %body, label %done
body:
  %place = mul i64 %j, {len(JOB)}
  %job = getelementptr i64, ptr %table_ptr, i64 %place
  call void @run_job(ptr %job, i64 %low, i64 %high, ptr %mine)
  %next = add i64 %j, 1
  br label %test
done:
  {leave}
  ret void
}}
"""


_RUN = f"""
define internal void @run_job(ptr %job, i64 %low, i64 %high, ptr %mine) {{
entry:
{_fields(JOB, "%job")}
  %kernel_ptr = inttoptr i64 %kernel to ptr
{_fields(KERNEL, "%kernel_ptr")}
  %a0 = sub i64 %low, %before
  %a = call i64 @llvm.smax.i64(i64 %a0, i64 0)
  %z0 = sub i64 %high, %before
  %z = call i64 @llvm.smin.i64(i64 %z0, i64 %steps)
  %some = icmp slt i64 %a, %z
  br i1 %some, label %split, label %done
split:
  %f = inttoptr i64 %code to ptr
  %row_ptr = inttoptr i64 %row to ptr
  %scalars_ptr = inttoptr i64 %scalars to ptr
  %sums = getelementptr double, ptr %mine, i64 %measures
  %full = sdiv i64 %elements, %step
  %z1 = call i64 @llvm.smin.i64(i64 %z, i64 %full)
  %any = icmp slt i64 %a, %z1
  br i1 %any, label %main, label %rest
main:
  %begin = mul i64 %a, %step
  %end = mul i64 %z1, %step
  call void %f(ptr %row_ptr, ptr %scalars_ptr, i64 %begin, i64 %end, i64 0, i64 %end, ptr %sums)
  br label %rest
rest:
  %has_tail = icmp sgt i64 %z, %full
  br i1 %has_tail, label %tail, label %done
tail:
  %from = mul i64 %full, %step
  %left = sub i64 %elements, %from
  call void @run_tail(ptr %job, i64 %from, i64 %left, ptr %sums)
  br label %done
done:
  ret void
}}
"""


def _loop_over_slots(name: str, previous: str, body: str, then: str) -> str:
    """A loop that copies something of each slot; `previous` is the block before it."""
    return f"""
  br label %{name}
{name}:
  %{name}_s = phi i64 [ 0, %{previous} ], [ %{name}_next, %{name}_end ]
  %{name}_more = icmp slt i64 %{name}_s, %slots
  br i1 %{name}_more, label %{name}_body, label %{then}
{name}_body:
  %{name}_number = mul i64 %{name}_s, 2
  %{name}_width_at = getelementptr i64, ptr %words_ptr, i64 %{name}_number
  %{name}_width = load i64, ptr %{name}_width_at
  %{name}_tensor_at = getelementptr ptr, ptr %row_ptr, i64 %{name}_s
  %{name}_tensor = load ptr, ptr %{name}_tensor_at
  %{name}_skip = mul i64 %from, %{name}_width
  %{name}_memory = getelementptr i8, ptr %{name}_tensor, i64 %{name}_skip
  %{name}_bytes = mul i64 %left, %{name}_width
  %{name}_at = mul i64 %{name}_s, %room
  %{name}_copy = getelementptr i8, ptr %buffer, i64 %{name}_at
{body}
  br label %{name}_end
{name}_end:
  %{name}_next = add i64 %{name}_s, 1
  br label %{name}
"""


_TAIL = f"""
define internal void @run_tail(ptr %job, i64 %from, i64 %left, ptr %sums) {{
entry:
{_fields(JOB, "%job")}
  %kernel_ptr = inttoptr i64 %kernel to ptr
{_fields(KERNEL, "%kernel_ptr")}
  %f = inttoptr i64 %code to ptr
  %row_ptr = inttoptr i64 %row to ptr
  %scalars_ptr = inttoptr i64 %scalars to ptr
  %words_ptr = getelementptr i64, ptr %kernel_ptr, i64 {len(KERNEL)}
  %room = mul i64 %step, 8
  %all = mul i64 %slots, %room
  %buffer = alloca i8, i64 %all, align 64
  %rows = alloca ptr, i64 %slots
  call void @llvm.memset.p0.i64(ptr %buffer, i8 0, i64 %all, i1 false)
{
    _loop_over_slots(
        "in",
        "entry",
        '''
  call void @llvm.memcpy.p0.p0.i64(ptr %in_copy, ptr %in_memory, i64 %in_bytes, i1 false)
  %in_row = getelementptr ptr, ptr %rows, i64 %in_s
  store ptr %in_copy, ptr %in_row''',
        "middle",
    )
}
middle:
  call void %f(ptr %rows, ptr %scalars_ptr, i64 0, i64 %step, i64 %from, i64 %left, ptr %sums)
{
    _loop_over_slots(
        "out",
        "middle",
        '''
  %out_flag_at = getelementptr i64, ptr %out_width_at, i64 1
  %out_flag = load i64, ptr %out_flag_at
  %out_size = mul i64 %out_bytes, %out_flag
  call void @llvm.memcpy.p0.p0.i64(ptr %out_memory, ptr %out_copy, i64 %out_size, i1 false)''',
        "done",
    )
}
done:
  ret void
}}
"""
