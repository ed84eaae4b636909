"""Gives a kernel a name of one line: its function and its library.

A trace has the demangled C++ of a kernel, with namespaces, template arguments and parameters: hundreds of characters.
Kernels that differ only in tile sizes or types of arguments get one name. The names of a trace are not trusted, so any
text gives a short line of printable characters.
"""

from __future__ import annotations

import re

LONGEST = 46
"""Characters of a name at most: what a table on a terminal of 80 columns has left beside its numbers."""
# Only so many characters of a longer name are read. The function is at its beginning.
_READ = 4096
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::|_GLOBAL__N_\w*::")
_IDENTIFIER = re.compile(r"(?:[A-Za-z_]\w*::)*[A-Za-z_]\w*")
# Kernels that run the function which is their template argument.
_ANY_FUNCTION = re.compile(r"\w*elementwise\w*|reduce_kernel|multi_tensor_apply_kernel")
_ANY_CLASS = re.compile(r"Kernel\d?|(cutlass_)?device_kernel\w*|_kernel_agent|enable_\w+|kernel")
# Template arguments that do not name the function: types, and torch's wrappers of functions.
_SAYS_NOTHING = re.compile(
    r"void|bool|char|short|int|long|float|double|signed|unsigned|const|true|false|auto|lambda|operator|nv_\w+|__\w+|"
    r"(?:\w+::)*(?:[Aa]rray|BFloat16|Half|half_t|bfloat16_t|complex|c10|TensorIterator\w*|Tensor\w*Metadata|"
    r"\w+Metadata|TensorInfo|Tensor|ArrayRef|ReduceOp|func_wrapper_t|[AB]?UnaryFunctor|BinaryFunctor|gpu_kernel_impl\w*|"
    r"(?:Unary|Binary|Ternary|Pointwise)Op\w*Functor|enable_\w+|T\d*|u?l+)"
)
# In a mangled name: a number, a substitution or a parameter, which are skipped; or the length of the name that follows.
_MANGLED = re.compile(r"L[a-z]n?\d+E|S[0-9A-Z]*_|T\d*_|(\d{1,4})(?=[A-Za-z_])")
# The sizes of tiles in the names of matrix products and convolutions, with all that follows; the function is the same.
_TILE = re.compile(r"_(?:tilesize|ldg\d|\d+x\d+).*")
_CUTLASS_PRODUCT = re.compile(r"(cutlass\w*?(?:gemm|fprop|dgrad|wgrad))_.*")
# Each library, and how the path or the name of its functions begins.
_LIBRARIES = (
    ("NCCL", re.compile(r"nccl|rccl")),
    ("Triton", re.compile(r"triton_")),
    ("FlashAttention", re.compile(r"(pytorch_)?flash(_|::|[A-Z])|Flash")),
    ("cuDNN", re.compile(r"(?i:\w*cudnn)")),
    (
        "cuBLAS",
        re.compile(r"(?i:\w*cublas)|nvjet_|gemv|gemmk1_|splitK|dot_kernel|(ampere|turing|volta|maxwell)_\w*gemm"),
    ),
    ("CUTLASS", re.compile(r"cutlass")),
    ("torch", re.compile(r"at::|c10d?::|softmax_warp|fmha_cutlass")),
    ("CUB", re.compile(r"(\w+::)*cub::")),
    ("Thrust", re.compile(r"(\w+::)*thrust::")),
    ("Tensile", re.compile(r"Cijk_")),
)


def kernel_name(raw: str) -> str:
    """The name of a kernel as a table shows it, such as `FillFunctor vectorized_elementwise (torch)`.

    `raw` is the name in a trace, which is mangled where torch's demangler gave up. The result has at most `LONGEST`
    printable characters.
    """
    text = " ".join(printable(raw[:_READ]).split())
    if text.startswith(("Memcpy", "Memset")):
        return shorten(text)
    outermost, arguments = _split_template(_ANONYMOUS.sub("", _demangle(text)))
    path, function = outermost, outermost.rpartition("::")[2]
    if _ANY_CLASS.fullmatch(function) or _ANY_FUNCTION.fullmatch(function):
        # The first template argument that says what is computed, with its namespaces.
        names = (found[0] for found in _IDENTIFIER.finditer(arguments))
        inner = next((name for name in names if not _SAYS_NOTHING.fullmatch(name)), "")
        if inner and _ANY_CLASS.fullmatch(function):
            path, function = (inner if "::" in inner else f"{path}::{inner}"), inner.rpartition("::")[2]
        elif inner:
            outer = re.sub(r"_kernel(?=_|$)", "", function)
            function = f"{re.sub(r'_kernel(_cuda|_impl)?$', '', inner.rpartition('::')[2])} {outer}"
    library = _library(path, function, outermost)
    suffix = f" ({shorten(library, 16)})" if library else ""
    function = _TILE.sub("", _CUTLASS_PRODUCT.sub(r"\1", function)) or function
    return shorten(function, LONGEST - len(suffix)) + suffix


def _library(*names: str) -> str:
    """The first known library that one of the names belongs to; else the first name's namespace, such as vllm."""
    for each in names:
        for library, begins in _LIBRARIES:
            if begins.match(each):
                return library
    return names[0].split("::")[0] if "::" in names[0] else ""


def shorten(name: str, longest: int = LONGEST) -> str:
    """Cut the middle out of a long name, because names differ at their ends."""
    kept = longest - 3
    return name if len(name) <= longest else f"{name[: kept - kept // 2]}...{name[-(kept // 2) :]}"


def printable(text: str) -> str:
    """Put a blank in place of each character that cannot be printed."""
    return "".join(each if each.isprintable() else " " for each in text)


def _split_template(text: str) -> tuple[str, str]:
    """The path of a function, without its return type and its parameters, and its template arguments."""
    depth, begin, opening, closing = 0, 0, len(text), len(text)
    for place, letter in enumerate(text):
        if letter == "<":
            opening = place if depth == 0 else opening
            depth += 1
        elif letter == ">":
            depth = max(0, depth - 1)
            closing = place if depth == 0 else closing
        elif depth == 0 and letter == " " and text[place + 1 : place + 2].isidentifier():
            begin, opening = place + 1, len(text)  # all before this was the return type
        elif depth == 0 and letter == "(":
            text = text[:place]
            break
    if opening >= len(text):
        return text[begin:] or text, ""
    closing = closing if closing > opening else len(text)
    return text[begin:opening] + text[closing + 1 :], text[opening + 1 : closing]


def _demangle(text: str) -> str:
    """The names of a mangled one (Itanium C++ ABI, section 5.1), in the form of a demangled one."""
    if not text.startswith("_Z"):
        return text
    names, place, end = "", 2, -1
    while (found := _MANGLED.search(text, place)) is not None:
        place = found.end()
        if found[1] is None:
            continue
        joint = "::" if end == found.start() else ", " if "<" in names else "<"
        place = end = place + int(found[1])
        names = f"{names}{joint if names else ''}{text[found.end() : end]}"
    return f"{names}>" if "<" in names else names or text
