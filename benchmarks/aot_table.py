"""What the compiler makes of every Triton kernel, without a GPU: registers, spills, shared memory, tensor cores, size.

Compiles the `variants()` of each file in kernels/triton for the targets below and compares with the committed table of
the installed Triton version, so that a change is seen where nobody has a GPU. A spill, a product without tensor-core
instructions, more shared memory than a target has: problems with any version, table or no table.

Run with `python -m benchmarks.aot_table` (a minute; a few seconds with `aot_table permute`), and with `--write` where a
change is meant. With `--changed` only that is compiled of which Triton's own key of a compilation (its source and what
that calls, constants, options, compiler) is not the table's, and one variant a target all the same.
"""

import argparse
import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from benchmarks.rows_csv import read_rows, write_rows

ROOT = Path(__file__).parent.parent
COMMAND = "python -m benchmarks.aot_table --write"
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # bytes of a block
INSTRUCTIONS = {"sm_80": "mma.sync", "sm_90": "wgmma", "gfx942": "v_mfma"}  # what a product must show


@dataclass(frozen=True)
class Compiled:
    """One variant on one target.

    Attributes:
        operator: the file in kernels/triton.
        registers: of a thread; on gfx942 vector registers.
        spill_bytes: of a thread; the stack on NVIDIA, the private segment on AMD.
        shared_bytes: of a program.
        tensor_cores: the instruction, `-` for none.
        code_bytes: of instructions.
        key: Triton's, of all that the result depends on, shortened; another one says nothing about the result.
    """

    operator: str
    variant: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_cores: str
    code_bytes: int
    key: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """What it is compared by."""
        return self.operator, self.variant, self.target

    @property
    def label(self) -> str:
        """The place in words."""
        return f"{self.operator}: {self.variant} on {self.target}"


def table_path(version: str) -> Path:
    """The committed table of a Triton version."""
    return ROOT / "results" / "measured" / f"aot-triton-{version.split('+')[0]}.csv"


def variants_by_operator(only: Sequence[str] = ()) -> dict[str, list]:
    """Variants of every file in kernels/triton that has some, by its name.

    Raises:
        ValueError: `only` names a file that there isn't; two variants of one name; a launcher without variants.
    """
    from moebench.kernels import triton as package

    found = {}
    for name in sorted(module.name for module in iter_modules(package.__path__)):
        module = import_module(f"{package.__name__}.{name}")
        if hasattr(module, "variants"):
            found[name] = list(module.variants())
    unknown = sorted(set(only) - found.keys())
    if unknown:
        raise ValueError(f"no operator {unknown[0]!r} in kernels/triton; there is {', '.join(found) or 'none'}")
    for name, variants in found.items():
        names = [variant.name for variant in variants]
        if len(set(names)) < len(names):
            raise ValueError(f"kernels/triton/{name}.py: two variants of one name: {', '.join(sorted(names))}")
    missing = sorted(set(_launcher_files()) - {name for name, variants in found.items() if variants})
    if missing:
        raise ValueError(f"kernels/triton/{missing[0]}.py has a launcher, and no variants to compile")
    return {name: variants for name, variants in found.items() if not only or name in only}


def _launcher_files() -> Iterator[str]:
    """Files of kernels/triton that an operator launches."""
    from moebench import kernels
    from moebench.kernels.define import triton_operators

    for module in iter_modules(kernels.__path__):
        import_module(f"{kernels.__name__}.{module.name}")
    return (place.split(":")[0] for place in triton_operators().values())


def compile_variant(operator: str, variant, target: str, known: Mapping[str, Compiled] | None = None) -> Compiled:
    """Compile one variant for one target, as a launch would; or take what is `known` under the same key."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moebench.kernels.triton.variant import stages, warps

    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.signature[name] for name in names}
    aligned = [
        place
        for place, name in enumerate(names)
        if name not in variant.constants and (signature[name].startswith("*") or name in variant.aligned)
    ]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
    is_nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if is_nvidia else GPUTarget("hip", target, 64)
    is_amd = not is_nvidia
    options = {"num_warps": warps(variant.num_warps, is_amd), "num_stages": stages(variant.num_stages, is_amd)}
    key = _key(source, gpu, options)
    if known and key in known:
        return replace(known[key], operator=operator, variant=variant.name, target=target)
    compiled = triton.compile(source, target=gpu, options=options)
    binary, text = (compiled.asm[kind] for kind in (("cubin", "ptx") if is_nvidia else ("hsaco", "amdgcn")))
    registers, spills = _nvidia_usage(binary) if is_nvidia else _amd_usage(text)
    shared, found = compiled.metadata.shared, _instruction(text)
    return Compiled(operator, variant.name, target, registers, spills, shared, found, code_bytes(binary), key)


def _key(source, gpu, options: dict[str, int]) -> str:
    """The key under which Triton itself would find this compilation again; for AMD with its folder in it."""
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(gpu)
    text = get_cache_key(source, backend, backend.parse_options(dict(options)), env_vars={})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack, from the `cuobjdump` that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers and bytes of the private segment, from the assembly's metadata."""
    usage = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)", assembly)}
    return usage["vgpr_count"], usage["private_segment_fixed_size"]


def _instruction(assembly: str) -> str:
    for text, name in (("wgmma.mma_async", "wgmma"), ("mma.sync", "mma.sync"), ("v_mfma", "v_mfma")):
        if text in assembly:
            return name
    return "-"


def code_bytes(elf: bytes) -> int:
    """Bytes of the executable sections of a 64-bit ELF file: the rest holds paths and line numbers."""
    table, entry, count = (*struct.unpack_from("<Q", elf, 0x28), *struct.unpack_from("<HH", elf, 0x3A))
    executable = 0x4
    total = 0
    for place in range(table, table + entry * count, entry):
        flags, _, _, size = struct.unpack_from("<QQQQ", elf, place + 8)
        total += size if flags & executable else 0
    return total


def problems(rows: Iterable[Compiled], products: Iterable[tuple[str, str]]) -> list[str]:
    """What is wrong with any compiler: spills, products without tensor cores, too much shared memory.

    Args:
        products: operator and name of the variants that are products.
    """
    found, products = [], set(products)
    for row in rows:
        if row.spill_bytes:
            found.append(f"{row.label} spills {row.spill_bytes} bytes of every thread")
        if row.shared_bytes > SHARED_LIMITS[row.target]:
            limit = SHARED_LIMITS[row.target]
            found.append(f"{row.label} takes {row.shared_bytes} bytes of shared memory; a block has {limit}")
        needed = INSTRUCTIONS[row.target]
        if row.place[:2] in products and row.tensor_cores != needed:
            found.append(f"{row.label} is a product without {needed} (it shows {row.tensor_cores})")
    return found


def differences(rows: Sequence[Compiled], table: Sequence[Compiled]) -> list[str]:
    """What the table says otherwise, a line a variant and target."""
    now, then = ({row.place: row for row in side} for side in (rows, table))
    found = [f"{row.label} is new" for place, row in now.items() if place not in then]
    found += [f"{row.label} is gone" for place, row in then.items() if place not in now]
    for place in now.keys() & then.keys():
        new, old = asdict(now[place]), asdict(then[place])
        changed = [f"{name} {new[name]}, was {old[name]}" for name in new if name != "key" and new[name] != old[name]]
        if changed:
            found.append(f"{now[place].label}: {', '.join(changed)}")
    return sorted(found)


def text_table(rows: Sequence[Compiled]) -> str:
    """The rows, aligned."""
    header = ("operator", "variant", "target", "registers", "spills", "shared", "tensor cores", "code", "key")
    lines = [header, *(tuple(str(value) for value in asdict(row).values()) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def verdict(
    rows: Sequence[Compiled], products: Iterable[tuple[str, str]], path: Path, only: Sequence[str]
) -> list[str]:
    """Every reason to fail; says on standard output where there is no table to compare with."""
    found = problems(rows, products)
    if not path.exists():
        print(f"no table for this Triton version ({path.name}): checked spills, shared memory and tensor cores only")
        return found
    table = [row for row in read_rows(Compiled, path) if not only or row.operator in only]
    changes = differences(rows, table)
    if changes:
        found += [f"{change} (in {path.name})" for change in changes]
        found.append(f"if these changes are meant: {COMMAND}")
    return found


def _known(path: Path) -> dict[str, Compiled]:
    """The rows of a table by their keys; none where there is no table."""
    return {row.key: row for row in read_rows(Compiled, path) if row.key} if path.exists() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print, compare or write; 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot_table", description=__doc__.split("\n")[0])
    parser.add_argument("operator", nargs="*", help="files of kernels/triton; all where none is named")
    parser.add_argument("--write", action="store_true", help="write the table of the installed Triton version")
    parser.add_argument("--changed", action="store_true", help="compile what has changed since the table was written")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing")
    if options.write and options.operator:
        parser.error("--write takes no operator: the table holds all of them")
    import triton

    try:
        variants = variants_by_operator(options.operator)
    except ValueError as error:
        parser.error(str(error))
    every = [(name, variant) for name, found in variants.items() for variant in found]
    path = table_path(triton.__version__)
    known = _known(path) if options.changed else {}
    rows = [
        compile_variant(name, variant, target, known if place else None)
        for place, (name, variant) in enumerate(every)
        for target in SHARED_LIMITS
    ]
    products = [(name, variant.name) for name, variant in every if variant.is_product]
    print(text_table(rows))
    if options.write and rows:
        write_rows(rows, path)
        print(f"written to {path.relative_to(ROOT)}")
    wrong = verdict(rows, products, path, options.operator)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
