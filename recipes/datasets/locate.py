"""Find the images of a data set, and explain how to get missing ones."""

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
            f"Expected no root for the dataset 'slice', which is included in this package, but got {root!r}. Name the"
            f" images in that folder: --data.dataset {' or '.join([*DOWNLOADABLE, 'folder'])}"
        )
    if download and dataset not in DOWNLOADABLE:
        raise ValueError(
            f"Expected {' or '.join(DOWNLOADABLE)} to download, but the dataset {dataset!r} cannot be downloaded."
            " Remove --data.download"
        )
    if download and root is None:
        raise ValueError("Expected a folder for the download, but root is None. Set one: --data.root DIR")


def title(dataset: str) -> str:
    return DOWNLOADABLE[dataset].title if dataset in DOWNLOADABLE else "a folder of images"


def missing(dataset: str, root: Path, cause: str = "") -> str:
    """Say which files were expected where, and how to get them."""
    folders = "image files train/CLASS/* and test/CLASS/* (or val/CLASS/*)"
    if dataset not in DOWNLOADABLE:
        return f"Expected {folders} in {root.absolute()}, but found none. Choose another folder: --data.root DIR"
    known = DOWNLOADABLE[dataset]
    return (
        f"Expected {known.title} in {root.absolute()}, but did not find it{cause}. Looked for"
        f" {known.folder}/ with {', '.join(known.files)} (torchvision's layout), and for {folders}. To"
        f" download it: --data.root {root} --data.download true"
    )


def fetch(dataset: str, root: Path) -> None:
    try:
        DOWNLOADABLE[dataset].torchvision(root, download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())  # torchvision's message has a line per address
        cause = f", and its download failed ({type(error).__name__}: {reason})"
        raise FileNotFoundError(missing(dataset, root, cause)) from error
