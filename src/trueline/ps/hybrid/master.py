"""The master of a hybrid job: that of train, with the keeper of the servers beside it. No torch."""

from trueline.ps.hybrid.keeper import ServerKeeper
from trueline.train.master import server


def main() -> None:
    server.main(ServerKeeper)


if __name__ == "__main__":
    main()
