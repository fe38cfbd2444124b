"""Parquet files in the Hugging Face layout: a column of encoded images, and one of labels or texts."""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ddm_ray.data.sources import chunks
from ddm_ray.data.sources.chunks import IMAGE_BYTES, Encoded, EncodedChunk, Listing, Unit, chunked
from ddm_ray.data.sources.collection import Collection, Format
from ddm_ray.data.sources.conditions import CLASSES, TEXTS, Conditions
from ddm_ray.data.sources.files import Files, refusals
from ddm_ray.errors import DataError
from ddm_ray.parsing import parse_object
from ddm_ray.plain_text import name_form
from ddm_ray.remedies import Begin
from ddm_ray.spelling import some
from ddm_ray.store.refusals import refusal

IMAGES = ("image", "img", "jpg", "png")
FIXES = {
    "encoded images": "store the bytes of image files in it, as binary; paths and arrays aren't read",
    "texts": "cast it to string",
    "labels": "cast it to int64 or string",
}
"""Remedies for a column of another type, by what it holds."""
BATCH_ROWS, BATCH_BYTES = 64, 32 * 2**20
"""Maximum rows per read, and size of their values."""
MORE_BY_VALUES = 1.5
"""A chunk that isn't full by the footer's mean size ends once its values reach this share of CHUNK_FILE_BYTES."""
NAMES_BYTES = 2**22
"""Maximum size of schema metadata to read class names from."""
_BUFFER = 2**22


class Parquet(Format):
    """See Format. Files in the Hugging Face layout, or any with a column of encoded images."""

    plural = "parquet files"
    about = "parquet files: a column of encoded images, and one of labels, class names or captions"
    extensions = frozenset({"parquet"})

    def list(self, source: Collection, sizes: Mapping[str, int]) -> Listing:
        """See Format. Numbers stand for the classes that the first file names; `read` checks that other files agree."""
        listing = super().list(source, sizes)
        numbered = _named_numbers(source.files, listing.units[0], source.conditions)
        return replace(listing, classes=numbered if source.conditions.counted else None, numbered=numbered)

    def read(self, source: Collection, unit: Unit, skip: Container[int]) -> Iterator[EncodedChunk]:
        """See Format. A file is read from its beginning, since the sizes of values decide where chunks end."""
        files, conditions, (path,), (size,) = source.files, source.conditions, unit.files, unit.sizes
        files.check(path, size)
        where = files.where(path)
        with _as_data_error(where):
            # Reads page by page through a buffer of fixed size, since a row group may be larger than memory.
            file = pq.ParquetFile(
                files.open_anywhere(path), pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True
            )
        with file:
            with _as_data_error(where):
                image, condition = _columns(file.schema_arrow, conditions, where)
                named = _class_names(file.schema_arrow, condition)
                if None not in (named, conditions.numbered) and named != conditions.numbered:
                    raise DataError(f"{where}: numbers its classes differently from the first file; make them agree")
                _check_counts(file.metadata, where)
                chunk_rows = min(source.chunk_rows, _rows_that_fill(file.metadata))
            rows = _rows(file, path, where, (image, condition), chunk_rows, conditions)
            yield from chunked(rows, chunk_rows, skip, MORE_BY_VALUES * chunks.CHUNK_FILE_BYTES)

    def count(self, source: Collection, unit: Unit) -> int:
        """Rows of a file, from its footer. Raises DataError."""
        where = source.files.where(unit.files[0])
        with _as_data_error(where), source.files.open_anywhere(unit.files[0]) as opened:
            return int(pq.read_metadata(opened).num_rows)


def _named_numbers(files: Files, unit: Unit, conditions: Conditions) -> tuple[str, ...] | None:
    """Names of the classes that numbers in a file stand for, if its schema has them; None: numbers are labels.

    Numbers are the run's labels also if no name is one of the run's: the run calls the classes otherwise. Raises
    DataError if only some names are the run's, and for more classes than a run counts that names none.
    """
    where = files.where(unit.files[0])
    files.check(unit.files[0], unit.sizes[0])
    with _as_data_error(where), files.open_anywhere(unit.files[0]) as file:
        schema = pq.read_schema(file)
    if not conditions.needed or conditions.captions:
        return None
    named, known = _class_names(schema, _columns(schema, conditions, where)[1]), conditions.config.class_names
    if named is None:
        return None
    if conditions.counted:
        if len(named) <= len(known):
            return named
        many = f"{len(named)} classes ({some(named)}) are more than data.num_classes {len(known)}"
        raise DataError(f"{where}: {many}", Begin(field="data.num_classes", value=f"{len(named)}"))
    forms, others = set(map(name_form, named)), set(map(name_form, known))
    if not forms & others and len(named) <= len(known):
        return None
    if strays := [name for name in named if name_form(name) not in others]:
        without = [name for name in known if name_form(name) not in forms]
        raise DataError(
            f"{where}: classes that are none of class_names: {some(strays)}; of class_names it lacks:"
            f" {some(without) or 'none'}; begin a run with its names, or with data.num_classes={len(named)}"
        )
    return named


def _class_names(schema: pa.Schema, column: str | None) -> tuple[str, ...] | None:
    """Names of the classes 0, 1, ... in a column of numbers, from a Hugging Face data set's metadata; None: not there.

    The library `datasets` writes the features into the schema's metadata, as JSON (`Features.arrow_schema`).
    """
    data = (schema.metadata or {}).get(b"huggingface", b"")
    if column is None or not 0 < len(data) <= NAMES_BYTES or _is_text(schema.field(column).type):
        return None
    try:
        names = parse_object(data)["info"]["features"][column]["names"]
    except (ValueError, LookupError, TypeError):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) and name.isprintable() for name in names):
        return None
    return tuple(names) if 0 < len(set(map(name_form, names))) == len(names) else None


def _rows(
    file: pq.ParquetFile,
    path: str,
    where: str,
    names: tuple[str, str | None],
    chunk_rows: int,
    conditions: Conditions,
) -> Iterator[tuple[Encoded, float]]:
    columns = [name for name in names if name is not None]
    row, num_rows = 0, file.metadata.num_rows
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        stop = row + metadata.num_rows
        with _as_data_error(f"{where}, row group {group}"):
            # A dictionary stores a value once, as large as the group perhaps, and every row may repeat it.
            batch_rows = max(1, min(BATCH_ROWS, chunk_rows, BATCH_BYTES // max(1, metadata.total_byte_size)))
            for batch in file.iter_batches(batch_rows, [group], columns):
                for encoded in _encoded(batch, *names, f"{path}/", row, conditions):
                    row += 1
                    yield encoded, row / num_rows
                if batch.nbytes > _BUFFER:
                    del batch
                    pa.default_memory_pool().release_unused()
        if row != stop:
            raise DataError(f"{where}, row group {group}: has fewer rows than its footer says; fetch it again")


def _rows_that_fill(metadata: pq.FileMetaData) -> int:
    """Rows that fill CHUNK_FILE_BYTES, by the footer's mean over the row group with the largest rows.

    Its metadata of columns isn't used, since pyarrow aborts the process if that is damaged.
    """
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    row_bytes = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=0)
    return max(1, int(chunks.CHUNK_FILE_BYTES / max(1, row_bytes)))


def _check_counts(metadata: pq.FileMetaData, where: str) -> None:
    """Raises DataError if the footer's numbers of rows contradict each other, since rows get their ids by them."""
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    if sum(groups) != metadata.num_rows or min(groups, default=0) < 0:
        raise DataError(f"{where}: its footer's numbers of rows don't agree; fetch it again")


@contextmanager
def _as_data_error(where: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, *refusals(where)) as error:
        raise DataError(f"{where}: can't be read ({refusal(error)}); fetch it again, or leave it out") from None


def _encoded(
    batch: pa.RecordBatch, image: str, condition: str | None, prefix: str, first: int, conditions: Conditions
) -> Iterator[Encoded]:
    images, null = batch.column(image), "no image: its bytes are null"
    if pa.types.is_struct(images.type):
        null += ", and paths aren't read" if images.type.get_field_index("path") >= 0 else ""
        images = pc.struct_field(images, "bytes")
    stated = batch.column(condition) if condition is not None else pa.nulls(len(batch))
    for index in range(len(batch)):
        row_id = f"{prefix}{first + index:08d}"
        content = images[index]
        try:
            if not content.is_valid:
                raise ValueError(null)
            if (size := content.as_buffer().size) > IMAGE_BYTES:
                raise ValueError(f"its image has {size} bytes, more than {IMAGE_BYTES}")
            yield Encoded(row_id, content.as_py(), conditions.of(_value(stated[index])))
        except ValueError as problem:
            yield Encoded(row_id, None, None, str(problem))


def _value(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise ValueError("its text is not UTF-8") from None


def _columns(schema: pa.Schema, conditions: Conditions, where: str) -> tuple[str, str | None]:
    """Names of the columns of images and, if needed, of conditions."""
    config = conditions.config
    images = [field.name for field in schema if _holds_images(field.type)]
    image = _column(schema, images, config.image_column, IMAGES, "image_column", "encoded images", where)
    if not conditions.needed:
        return image, None
    usual, what = (TEXTS, "texts") if conditions.captions else (CLASSES, "labels")
    fits = _is_text if conditions.captions else _is_label
    named = [field.name for field in schema if fits(field.type)]
    # A column of numbers or texts may mean anything, so its type alone doesn't make it the condition.
    fitting = [name for name in named if name in (*usual, config.condition_column)]
    return image, _column(schema, fitting, config.condition_column, usual, "condition_column", what, where)


def _column(
    schema: pa.Schema, fitting: list[str], chosen: str | None, usual: tuple[str, ...], field: str, what: str, where: str
) -> str:
    if twice := next((name for name in ((chosen,) if chosen else usual) if schema.names.count(name) > 1), None):
        raise DataError(f"{where}: several columns are called {twice!r}; rename all but one")
    if chosen is not None:
        if chosen not in fitting:
            if chosen not in schema.names:
                raise DataError(f"{where}: data.{field} {chosen!r} is not there, no column of {what}; {_names(schema)}")
            raise _misfit(schema, chosen, what, where)
        return chosen
    for name in usual:
        if name in fitting:
            return name
    if len(fitting) == 1:
        return fitting[0]
    if misfit := next((name for name in usual if name in schema.names), None):
        raise _misfit(schema, misfit, what, where)
    fix = Begin(field=f"data.{field}", value="NAME")
    raise DataError(f"{where}: which column has the {what}? {_names(schema)}", fix)


def _misfit(schema: pa.Schema, name: str, what: str, where: str) -> DataError:
    """The error for a column that is of a type that isn't read."""
    kind = schema.field(name).type
    return DataError(f"{where}: {name!r} is {kind}, no column of {what}; {FIXES[what]}")


def _names(schema: pa.Schema) -> str:
    return f"there are {', '.join(schema.names)}"[:200]


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and _holds_images(kind.field(index).type)
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return any(is_kind(kind) for is_kind in binary)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_label(kind: pa.DataType) -> bool:
    """True for whole numbers, also as floats, which pandas makes of a column with gaps, for truth values and texts."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    numbers = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating, pa.types.is_decimal)
    return any(is_kind(kind) for is_kind in numbers) or _is_text(kind)
