"""Text into the indexed dataset that Megatron trains on; every byte is a token, every file a document.

    python examples/prepare_text.py --output text/stdlib

Without files it takes the Python sources of the running interpreter's standard library, so nothing is downloaded. The
tokenizer needs nothing but the Megatron wheel: ids 0 to 255 are bytes, 256 ends a document. It prints the flags that
`pretrain_gpt.py` (or any script of Megatron's) then needs.
"""

import argparse
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from commfuse_megatron.tools.common.output import make_progress, silence_foreign_warnings, why_folder_cannot_be_written

END_OF_DOCUMENT = 256
VOCABULARY = 257


def main() -> int:
    """Write the dataset. 0: written; 2: it cannot be, and why."""
    parser, chosen = parse()
    try:
        files = find_files(chosen.sources, tuple(chosen.suffix))
        num_documents, num_tokens = write_dataset(files, chosen.output, max_bytes=int(chosen.max_mib * 2**20))
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{num_documents} documents, {num_tokens:,} tokens in {chosen.output}.bin and {chosen.output}.idx")
    print(f"train on it with: --data-path {chosen.output} --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}")
    return 0


def find_files(sources: Iterable[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """The files that `sources` name, those in folders by their suffix, in one order on every machine.

    Raises FileNotFoundError for a source that does not exist, ValueError if nothing is left.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = [file for file in source.rglob("*") if file.suffix in suffixes and file.is_file()]
            found += sorted(inside, key=lambda file: file.relative_to(source).parts)
        elif source.exists():
            found.append(source)
        else:
            raise FileNotFoundError(f"{source} does not exist")
    found = list(dict.fromkeys(found))
    if not found:
        raise ValueError(f"no files that end in {' or '.join(suffixes)} in {', '.join(map(str, sources))}")
    return found


def write_dataset(files: list[Path], output: Path, *, max_bytes: int) -> tuple[int, int]:
    """Write `output`.bin and `output`.idx; (documents, tokens). Empty files are left out.

    Reading ends with the document that reaches `max_bytes`. The index is written last: an interrupted run leaves none.
    """
    with warnings.catch_warnings():
        silence_foreign_warnings()
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    reason = why_folder_cannot_be_written(output.parent)
    if reason is not None:
        raise OSError(reason)
    output.parent.mkdir(parents=True, exist_ok=True)
    index = Path(get_idx_path(str(output)))
    index.unlink(missing_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(output)), dtype=DType.optimal_dtype(VOCABULARY))
    num_documents = num_bytes = 0
    to_read = min(max_bytes, sum(file.stat().st_size for file in files))
    with make_progress() as progress:
        task = progress.add_task("KiB", total=-(-to_read // 1024))
        for file in files:
            text = file.read_bytes()
            if not text:
                continue
            tokens = np.empty(len(text) + 1, dtype=np.int64)
            tokens[:-1] = np.frombuffer(text, dtype=np.uint8)
            tokens[-1] = END_OF_DOCUMENT
            builder.add_document(tokens, [tokens.size])
            num_documents += 1
            num_bytes += len(text)
            # The last document reaches beyond what was to be read.
            progress.update(task, completed=-(-min(num_bytes, to_read) // 1024))
            if num_bytes >= max_bytes:
                break
    if not num_documents:
        builder.data_file.close()
        raise ValueError("all files are empty")
    builder.finalize(str(index))
    return num_documents, num_bytes + num_documents


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, for its name, and what the command line chooses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, sources, suffixes = parser.add_argument, [Path(sysconfig.get_paths()["stdlib"])], [".py", ".txt", ".md"]
    add("sources", nargs="*", type=Path, metavar="FILE_OR_FOLDER", default=sources, help="default: standard library")
    add("--output", type=Path, required=True, metavar="PREFIX", help="of PREFIX.bin and PREFIX.idx; folders are made")
    add("--suffix", nargs="+", default=suffixes, help="files to take from folders (default: .py .txt .md)")
    add(
        "--max-mib", type=float, default=16.0, metavar="N", help="end with the document that reaches N MiB; default: 16"
    )
    chosen = parser.parse_args()
    if not chosen.max_mib > 0:
        parser.error(f"--max-mib must be above 0, got {chosen.max_mib:g}")
    return parser, chosen


if __name__ == "__main__":
    sys.exit(main())
