"""Columns of records as users have them: declared in a recipe, fitted once on the training records, applied everywhere.

    from trueline.columns import Category, Image, Label, Number, Series, Text

    columns = {"age": Number(missing="mean"), "city": Category(), "review": Text(max_length=64), "income": Label()}

`fit` makes a FittedColumns of the declaration and the records. Training, evaluation, prediction and the server encode
records with the same functions of it. Imports no torch; pyarrow is imported for tables, not for rows of requests.
"""

from trueline.columns.declared import Category as Category
from trueline.columns.declared import Image as Image
from trueline.columns.declared import Label as Label
from trueline.columns.declared import Number as Number
from trueline.columns.declared import Series as Series
from trueline.columns.declared import Text as Text
