"""The driver: the function that every thread of a team runs, with its share of all parameters laid end to end.

It is compiled once, for all updates. In Python, with `jobs` as `jobs.py` lays them out in memory::

    def share(context, t, threads):
        save the mode of the floating-point unit, and set the default: to nearest, subnormals kept, no traps
        low, high = total * t // threads, total * (t + 1) // threads         # in units of work
        for job in jobs:
            a, z = ceil(max(low - job.before, 0) / unit), ceil(min(high - job.before, job.work) / unit)
            of_row, full = ceil(job.length / step), job.length // step         # steps of a row; those that are whole
            while a < z:                                                       # row after row
                row, first = divmod(a, of_row)
                last = min(first + z - a, of_row)
                start = row * job.length
                if first < min(last, full):
                    kernel.code(job.row, job.scalars, start + first * step, start + min(last, full) * step, 0, all,
                                a, measures)
                if last > full:
                    copy the last elements of each tensor's row to a buffer, which is otherwise 0
                    kernel.code(the buffer's row, job.scalars, 0, step, start + full * step, the number of those,
                                0, measures)
                    copy them back to the tensors that the kernel writes
                a += last - first
        restore the mode

Where elements are independent, a tensor is one row.
"""

from __future__ import annotations

JOB = ("kernel", "row", "scalars", "length", "before", "work", "measures")
"""The 64-bit numbers that describe a job, one update of one parameter.

`kernel`, `row` (of the tensors' addresses) and `scalars` are addresses; `length` is that of a row of elements; `before`
is the work of all jobs before it; `measures` is where its measurements begin, in doubles.
"""

KERNEL = ("code", "step", "unit", "slots")
"""The 64-bit numbers that describe a kernel, of which a step is `unit` units of work; then `SLOT` for each slot."""

SLOT = ("bytes", "written", "shared")
"""The bytes of a word; 1 if it is written, else 0; 1 if the elements of a step share one word, else 0."""

CONTEXT = ("jobs", "total", "measures", "stride", "table")
"""The 64-bit numbers that describe a step of the optimizer: how many jobs, their work, an address of measurements with
the doubles of each thread, and the address of the first job."""

# Each thread has a mode of its own, and other code may have changed some (`torch.set_flush_denormal`): bits would
# depend on the thread that computes an element.
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


# Shares are equal in work and not in jobs, so that one large parameter is updated by all threads.
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


# Both ends of a share are rounded up to whole steps of a kernel, so that a thread begins where the one before it ends.
_RUN = f"""
define internal i64 @steps_of(i64 %work, i64 %unit) {{
  %above = add i64 %work, %unit
  %most = sub i64 %above, 1
  %steps = sdiv i64 %most, %unit
  ret i64 %steps
}}

define internal void @run_job(ptr %job, i64 %low, i64 %high, ptr %mine) {{
entry:
{_fields(JOB, "%job")}
  %kernel_ptr = inttoptr i64 %kernel to ptr
{_fields(KERNEL, "%kernel_ptr")}
  %a0 = sub i64 %low, %before
  %a1 = call i64 @llvm.smax.i64(i64 %a0, i64 0)
  %z0 = sub i64 %high, %before
  %z1 = call i64 @llvm.smin.i64(i64 %z0, i64 %work)
  %some = icmp slt i64 %a1, %z1
  br i1 %some, label %prepare, label %done
prepare:
  %begin = call i64 @steps_of(i64 %a1, i64 %unit)
  %z = call i64 @steps_of(i64 %z1, i64 %unit)
  %f = inttoptr i64 %code to ptr
  %row_ptr = inttoptr i64 %row to ptr
  %scalars_ptr = inttoptr i64 %scalars to ptr
  %sums = getelementptr double, ptr %mine, i64 %measures
  %of_row = call i64 @steps_of(i64 %length, i64 %step)
  %full = sdiv i64 %length, %step
  %whole = mul i64 %full, %step
  %left = sub i64 %length, %whole
  br label %test
test:
  %a = phi i64 [ %begin, %prepare ], [ %a_next, %next ]
  %more = icmp slt i64 %a, %z
  br i1 %more, label %split, label %done
split:
  %number = sdiv i64 %a, %of_row
  %before_row = mul i64 %number, %of_row
  %first = sub i64 %a, %before_row
  %rest_of_job = sub i64 %z, %before_row
  %last = call i64 @llvm.smin.i64(i64 %rest_of_job, i64 %of_row)
  %done_here = sub i64 %last, %first
  %start = mul i64 %number, %length
  %last_full = call i64 @llvm.smin.i64(i64 %last, i64 %full)
  %any = icmp slt i64 %first, %last_full
  br i1 %any, label %main, label %rest
main:
  %skipped = mul i64 %first, %step
  %from = add i64 %start, %skipped
  %reached = mul i64 %last_full, %step
  %to = add i64 %start, %reached
  call void %f(ptr %row_ptr, ptr %scalars_ptr, i64 %from, i64 %to, i64 0, i64 %to, i64 %a, ptr %sums)
  br label %rest
rest:
  %has_tail = icmp sgt i64 %last, %full
  br i1 %has_tail, label %tail, label %next
tail:
  %tail_at = add i64 %start, %whole
  %word = add i64 %before_row, %full
  call void @run_tail(ptr %job, i64 %tail_at, i64 %left, i64 %word, ptr %sums)
  br label %next
next:
  %a_next = add i64 %a, %done_here
  br label %test
done:
  ret void
}}
"""


# The last elements of a row are updated in a buffer of a whole step, so that no kernel needs masks. A word has 8 bytes
# of room there, more than any type; what follows the elements is 0, and is not copied back.
_TAIL = f"""
define internal void @run_tail(ptr %job, i64 %from, i64 %left, i64 %word, ptr %sums) {{
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
  call void @copy(ptr %words_ptr, i64 %slots, ptr %row_ptr, ptr %buffer, i64 %room, ptr %rows, i64 %from, i64 %left,
                  i64 %word, i1 false)
  call void %f(ptr %rows, ptr %scalars_ptr, i64 0, i64 %step, i64 %from, i64 %left, i64 0, ptr %sums)
  call void @copy(ptr %words_ptr, i64 %slots, ptr %row_ptr, ptr %buffer, i64 %room, ptr %rows, i64 %from, i64 %left,
                  i64 %word, i1 true)
  ret void
}}

define internal void @copy(ptr %words, i64 %slots, ptr %row, ptr %buffer, i64 %room, ptr %rows, i64 %from, i64 %left,
                           i64 %word, i1 %back) {{
entry:
  br label %loop
loop:
  %s = phi i64 [ 0, %entry ], [ %next, %loop ]
  %number = mul i64 %s, {len(SLOT)}
  %slot = getelementptr i64, ptr %words, i64 %number
{_fields(SLOT, "%slot")}
  %tensor_at = getelementptr ptr, ptr %row, i64 %s
  %tensor = load ptr, ptr %tensor_at
  %is_shared = icmp ne i64 %shared, 0
  %first = select i1 %is_shared, i64 %word, i64 %from
  %count = select i1 %is_shared, i64 1, i64 %left
  %skip = mul i64 %first, %bytes
  %memory = getelementptr i8, ptr %tensor, i64 %skip
  %at = mul i64 %s, %room
  %own = getelementptr i8, ptr %buffer, i64 %at
  %own_at = getelementptr ptr, ptr %rows, i64 %s
  store ptr %own, ptr %own_at
  %times = select i1 %back, i64 %written, i64 1
  %many = mul i64 %count, %times
  %size = mul i64 %many, %bytes
  %to = select i1 %back, ptr %memory, ptr %own
  %source = select i1 %back, ptr %own, ptr %memory
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %source, i64 %size, i1 false)
  %next = add i64 %s, 1
  %more = icmp slt i64 %next, %slots
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""
