"""Where the images of a data set are looked for, and what is said if they are not there."""

from pathlib import Path

from lightning_normtheory.recipes.datasets.folder import image_folder
from lightning_normtheory.recipes.datasets.source import Source
from lightning_normtheory.recipes.datasets.torchvision_sets import DOWNLOADABLE

__all__ = ["check_place", "fetch", "find", "missing", "title"]


def find(dataset: str, root: Path) -> Source | None:
    known = DOWNLOADABLE.get(dataset)
    if known is not None and all((root / known.folder / file).is_file() for file in known.files):
        return known.source(root)
    validation = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if validation is None or not (root / "train").is_dir():
        return None
    return image_folder(known.title if known else root.resolve().name, root / "train", validation)


def check_place(dataset: str, root: str | None, download: bool) -> None:
    if dataset == "slice" and root is not None:
        raise ValueError(
            f"Expected no root for the dataset 'slice', which comes with this package, but got {root!r}. Say which"
            f" images are there: --data.dataset {' or '.join([*DOWNLOADABLE, 'folder'])}"
        )
    if download and dataset not in DOWNLOADABLE:
        raise ValueError(
            f"Expected {' or '.join(DOWNLOADABLE)} to download, but the dataset is {dataset!r}, which has no address."
            " Leave out --data.download"
        )
    if download and root is None:
        raise ValueError("Expected a folder for the download, but root is None. Name one: --data.root DIR")


def title(dataset: str) -> str:
    return DOWNLOADABLE[dataset].title if dataset in DOWNLOADABLE else "a folder of images"


def missing(dataset: str, root: Path, cause: str = "") -> str:
    """The message: where was looked, for what, and how it gets there."""
    folders = "image files train/CLASS/* and test/CLASS/* (or val/CLASS/*)"
    if dataset not in DOWNLOADABLE:
        return f"Expected {folders} in {root.absolute()}, but they are not there. Name their folder: --data.root DIR"
    known = DOWNLOADABLE[dataset]
    return (
        f"Expected {known.title} in {root.absolute()}, but it is not there{cause}. Looked for"
        f" {known.folder}/ with {', '.join(known.files)} (torchvision's layout), and for {folders}. Where there is"
        f" network, this fetches it: --data.root {root} --data.download true"
    )


def fetch(dataset: str, root: Path) -> None:
    try:
        DOWNLOADABLE[dataset].torchvision(root, download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())  # torchvision's has a line for each address
        cause = f", and its download failed ({type(error).__name__}: {reason})"
        raise FileNotFoundError(missing(dataset, root, cause)) from error
