"""Clusters that ttnn can be told it runs on, in the form of its cluster descriptions."""

from collections.abc import Iterator, Mapping, Sequence

import attrs

Link = tuple[int, int, int, int]
"""One chip and its ethernet channel, another and its channel."""
HARVESTED = 32
"""One row of cores taken out, as a mask: with dispatch on worker cores the grid is that of a real N300."""


@attrs.frozen(kw_only=True)
class Cluster:
    """`boards` lists the chips of each; `on_bus` are those that the host reaches without another's help."""

    kind: str
    board_id: int = 72058994491072686
    """Of the first board; ttnn reads the kind from it, too."""
    boards: Sequence[Sequence[int]]
    on_bus: Sequence[int]
    places: Mapping[int, tuple[int, int]]
    links: Sequence[Link] = ()
    arch: str = "wormhole_b0"
    harvesting: str = f"harvest_mask: {HARVESTED}"
    rest: str = ""

    def described(self) -> str:
        """Its YAML."""
        chips = [chip for board in self.boards for chip in board]
        ends = [f"[{{chip: {a}, chan: {p}}}, {{chip: {b}, chan: {q}}}]" for a, p, b, q in self.links]
        boards = [
            f"[{{board_id: {board_id}}}, {{board_type: {self.kind}}}, {{chips: {list(board)}}}]"
            for board_id, board in enumerate(self.boards, self.board_id)
        ]
        by_chip: dict[str, Mapping[int, str]] = {
            "arch": dict.fromkeys(chips, self.arch),
            "chips": {chip: f"[{x}, {y}, 0, 0]" for chip, (x, y) in self.places.items()},
            "chip_unique_ids": {chip: str(1000004 + chip) for chip in chips},
            "harvesting": dict.fromkeys(chips, f"{{noc_translation: true, {self.harvesting}}}"),
            "chip_to_boardtype": dict.fromkeys(chips, self.kind),
        }
        maps = [
            f"{name}: {{{', '.join(f'{chip}: {value}' for chip, value in values.items())}}}"
            for name, values in by_chip.items()
        ]
        bus = ", ".join(f"{chip}: {chip}" for chip in self.on_bus)
        lists = [
            f"ethernet_connections: [{', '.join(ends)}]",
            f"chips_with_mmio: [{bus}]",
            f"boards: [{', '.join(boards)}]",
        ]
        return "\n".join([*maps, *lists, self.rest])


def linked(a: int, b: int, channels: Sequence[tuple[int, int]]) -> Iterator[Link]:
    yield from ((a, p, b, q) for p, q in channels)


def t3k() -> Cluster:
    """Four N300 in a grid of 4 by 2 chips; each board holds a left chip (0 to 3) and a right one (4 to 7)."""
    same, crossed, up = ((6, 6), (7, 7)), ((0, 0), (1, 1)), ((14, 14), (15, 15))
    pairs = {
        **{(chip, chip + 4): ((8, 0), (9, 1)) for chip in range(4)},
        **{(0, 2): same, (1, 3): crossed, (4, 5): same, (6, 7): same, (0, 1): up, (2, 3): up},
    }
    return Cluster(
        kind="n300",
        boards=[[left, left + 4] for left in range(4)],
        on_bus=range(4),
        places={4: (0, 0), 0: (1, 0), 2: (2, 0), 6: (3, 0), 5: (0, 1), 1: (1, 1), 3: (2, 1), 7: (3, 1)},
        links=[link for (a, b), channels in pairs.items() for link in linked(a, b, channels)],
    )


TRAYS = {1: 0xC0, 2: 0x80, 3: 0x00, 4: 0x40}
"""The bus address of a Galaxy's tray; ttnn tells by it where a chip stands."""
LOCATIONS = {
    2: ((1, 2, 3, 4), (5, 6, 7, 8)),
    4: ((4, 3, 2, 1), (8, 7, 6, 5)),
    1: ((5, 6, 7, 8), (1, 2, 3, 4)),
    3: ((8, 7, 6, 5), (4, 3, 2, 1)),
}


def galaxy(*, wraps: bool) -> Cluster:
    """32 chips in 8 rows of 4, four links an edge; with `wraps` the ends of rows and columns meet too."""
    links: list[Link] = []
    for row, column in ((row, column) for row in range(8) for column in range(4)):
        here = row * 4 + column
        if row < 7 or wraps:
            links += linked(here, (row + 1) % 8 * 4 + column, [(8 + lane, 4 + lane) for lane in range(4)])
        if column < 3 or wraps:
            links += linked(here, row * 4 + (column + 1) % 4, [(12 + lane, lane) for lane in range(4)])
    trays = {chip: ((2, 4), (1, 3))[chip % 4 // 2][chip // 4 // 4] for chip in range(32)}
    places = {chip: LOCATIONS[tray][chip % 4 % 2][chip // 4 % 4] for chip, tray in trays.items()}
    addresses = {chip: TRAYS[tray] + places[chip] for chip, tray in trays.items()}
    located = ", ".join(f"{chip}: {place}" for chip, place in places.items())
    addressed = ", ".join(f"{chip}: {address:#04x}" for chip, address in addresses.items())
    return Cluster(
        kind="ubb",
        board_id=72061240465162240,
        boards=[range(32)],
        on_bus=range(32),
        places={},
        links=links,
        harvesting="harvest_mask: 0",
        rest=f"asic_locations: {{{located}}}\nchip_to_bus_id: {{{addressed}}}",
    )


CLUSTERS = {
    "n150": Cluster(kind="n150", board_id=72059269369839682, boards=[[0]], on_bus=[0], places={0: (0, 0)}),
    "n300": Cluster(
        kind="n300",
        boards=[[0, 1]],
        on_bus=[0],
        places={0: (0, 0), 1: (1, 0)},
        links=[*linked(0, 1, [(8, 0), (9, 1)])],
    ),
    "t3k": t3k(),
    "galaxy": galaxy(wraps=False),
    "galaxy_torus": galaxy(wraps=True),
    "p150": Cluster(
        kind="p150",
        boards=[[0]],
        on_bus=[0],
        places={0: (0, 0)},
        arch="blackhole",
        harvesting="harvest_mask: 0, dram_harvesting_mask: 0,"
        " eth_harvesting_mask: 288, pcie_harvesting_mask: 2",
    ),
}
