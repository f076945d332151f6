"""What all pictures share: axes, and colours and lines that anybody can tell apart."""

# Okabe and Ito's palette: told apart with any common colour blindness. Their yellow and black are
# left out, the one too faint on white, the other taken by outlines.
BLUE, VERMILION = "#0072B2", "#D55E00"
COLORS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^Dvp"
GREY = "0.75"

# A line of its own for each colour: a print in grey keeps them apart.
LINES = ("-", "--", "-.", ":", (0, (7, 2, 1, 2, 1, 2)), (0, (9, 3)))


def new_axes(ax, projection=None, figsize=None):
    """`ax`, or new axes where it is None, of a figure of matplotlib's size or of another.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('Pictures need matplotlib: pip install "keras_margin[plot]"') from error
    # "compressed" keeps room for a legend beside square axes.
    figure = plt.figure(figsize=figsize, layout="compressed")
    return figure.add_subplot(projection=projection)


def line_look(place, points):
    """How the curve number `place` of a family is drawn, as arguments of `Axes.plot`.

    Line and marker together are of one curve alone; the first six curves have no markers.

    Args:
        place: 0 and up.
        points: of the curve; a few of them get the marker.
    """
    turn, kind = divmod(place, len(LINES))
    look = {"color": COLORS[(kind + turn) % len(COLORS)], "linestyle": LINES[kind], "linewidth": 2}
    if turn:
        every = max(1, points // 12)
        # Each curve begins elsewhere: markers of curves that meet do not hide each other.
        start = (kind * every) // len(LINES)
        look |= {"marker": MARKERS[(turn - 1) % len(MARKERS)], "markersize": 6}
        look |= {"markevery": (start, every)}
    return look
