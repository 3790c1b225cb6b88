"""What ptxas makes of a word with two equal halves, and how such words are found."""

import subprocess
import tempfile
from pathlib import Path

import pytest
import triton
from helpers.equal_halves import equal_halves

from tilewise.testing import offline

KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 out, .param .u64 x) {{
.reg .b64 %rd<4>; .reg .b32 %r<9>; .reg .b16 %rs<4>;
ld.param.u64 %rd1, [out];
ld.param.u64 %rd2, [x];
ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd2];
{body}
st.global.b32 [%rd1], %r8;
ret;
}}
"""
ONE = "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r2;"
BODIES = {
    "one conversion": (ONE + "mov.b32 %r8, {%rs1, %rs1};", 1),
    "the same again": (ONE + ONE.replace("%rs1", "%rs2") + "mov.b32 %r8, {%rs2, %rs1};", 1),
    "of equal exponentials": (
        "ex2.approx.ftz.f32 %r5, %r1; ex2.approx.ftz.f32 %r6, %r1;"
        " cvt.rn.satfinite.e4m3x2.f32 %rs1, %r5, %r6; cvt.rn.satfinite.e4m3x2.f32 %rs2, %r6, %r5;"
        " mov.b32 %r8, {%rs1, %rs2};",
        1,
    ),
    "two conversions": (
        ONE + "cvt.rn.satfinite.e4m3x2.f32 %rs2, %r3, %r2; mov.b32 %r8, {%rs2, %rs1};",
        0,
    ),
    "a register that is written again": (
        ONE + "add.f32 %r1, %r1, %r3; cvt.rn.satfinite.e4m3x2.f32 %rs2, %r1, %r2;"
        " mov.b32 %r8, {%rs2, %rs1};",
        0,
    ),
    "halves of 16 bits": ("cvt.rn.f16.f32 %rs1, %r1; mov.b32 %r8, {%rs1, %rs1};", 0),
}


@pytest.mark.parametrize("name", BODIES)
def test_words_with_equal_halves_are_found(name):
    body, count = BODIES[name]
    assert len(equal_halves(KERNEL.format(body=body))) == count


@pytest.mark.compile
@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="Triton 3.6's ptxas")
def test_ptxas_leaves_a_half_as_it_was():
    """Code that is right has a move from half to half, as that for sm_89 has. Once this is right,
    too, lengths may be constants (`tile.fp8.not_constant`).
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(KERNEL.format(body=BODIES["one conversion"][0]), "utf-8")
        subprocess.run([tool, "-arch=sm_90a", source, "-o", cubin], check=True)
        sass = offline._disassemble(cubin.read_bytes())
    assert "F2FP" in sass and "PRMT" not in sass
