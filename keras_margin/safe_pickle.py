"""Reads pickles of plain values without executing anything in them.

A pickle is a program for a small machine. This one runs the instructions that build lists, tuples,
bytes, booleans, whole numbers and NumPy's scalars of these, and refuses every other.
"""

import io
import pickletools

import numpy as np

_MARK = object()
# Instructions whose argument is the value.
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINUNICODE", "SHORT_BINUNICODE", "UNICODE"),
}
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}
_NOTHING = {"PROTO", "FRAME"}
# How pickle spells NumPy's scalars, and bytes in Python 3's protocol 2.
_SCALAR = {"numpy.core.multiarray scalar", "numpy._core.multiarray scalar"}
_DTYPE = "numpy dtype"
_ENCODE = "_codecs encode"
_SCALAR_KINDS = {"b1", "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}


def loads(data):
    """The value that a pickle of plain values holds.

    Args:
        data: bytes, of any protocol, of Python 2 or 3. Python 2's strings are bytes.

    Returns:
        Nested lists and tuples of bytes, text, booleans, whole numbers and None.

    Raises:
        ValueError: anything else is in it, or it is cut short; the message says at which byte.
    """
    machine, position = _Machine(), 0
    try:
        for operation, argument, place in pickletools.genops(io.BytesIO(data)):
            position = place
            if operation.name == "STOP":
                return machine.result()
            machine.run(operation.name, argument)
    except _Refused as error:
        raise ValueError(f"{error} at byte {position}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        # What pickletools and the machine say of a damaged one.
        raise ValueError(f"damaged after byte {position} ({error})") from None
    raise ValueError(f"cut short after byte {position}")


class _Refused(ValueError):
    pass


class _Machine:
    def __init__(self):
        self._stack, self._memo = [], {}

    def result(self):
        (value,) = self._stack
        if isinstance(value, _Name):
            raise _Refused(f"refused: {value.text}")
        return value

    def run(self, name, argument):
        stack = self._stack
        if name in _NOTHING:
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in ("STRING", "BINSTRING", "SHORT_BINSTRING"):  # Python 2's
            stack.append(argument.encode("latin-1") if isinstance(argument, str) else argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append([] if name == "EMPTY_LIST" else ())
        elif name in ("LIST", "TUPLE"):
            items = self._since_mark()
            stack.append(items if name == "LIST" else tuple(items))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            stack[-size:] = [tuple(stack[-size:])]
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._since_mark()
            if not isinstance(stack[-1], list):
                raise _Refused("refused: items for what is no list")
            stack[-1].extend(items)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(_Name(argument))
        elif name == "STACK_GLOBAL":
            module, attribute = stack[-2:]
            stack[-2:] = [_Name(f"{module} {attribute}")]
        elif name == "REDUCE":
            called, arguments = stack[-2:]
            stack[-2:] = [_made(called, arguments)]
        elif name == "BUILD":
            stack.pop()  # byte order and the like, of a dtype
            if not isinstance(stack[-1], _Dtype):
                raise _Refused("refused: state for an object")
        else:
            raise _Refused(f"refused: the instruction {name}")

    def _since_mark(self):
        place = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items


class _Name:
    """What a pickle names; it is never imported."""

    def __init__(self, text):
        self.text = text


class _Dtype:
    def __init__(self, kind):
        self.kind = kind


def _made(called, arguments):
    """What a call of one of the three known functions would have given."""
    name = called.text if isinstance(called, _Name) else None
    if name == _DTYPE and arguments[0] in _SCALAR_KINDS:
        return _Dtype(arguments[0])
    if name in _SCALAR and isinstance(arguments[0], _Dtype):
        dtype, data = arguments
        data = data.encode("latin-1") if isinstance(data, str) else data
        (value,) = np.frombuffer(data, dtype.kind)
        return value.item()
    if name == _ENCODE and isinstance(arguments[0], str) and arguments[1] == "latin1":
        return arguments[0].encode("latin-1")
    raise _Refused(f"refused: a call of {name or 'an object'}")
