# SPDX-License-Identifier: BSL-1.0
"""The API reference: pages of docs/api/ name what they describe, and this module writes it from the docstrings, as Markdown.

A page has lines

    ::: Reducer          a class, struct, concept, enumeration, alias, variable, or all functions of a name; `gradsync::` is left out
    ::: TcpBackend own   a class without the members that it inherits

Doxygen reads the docstrings and writes XML, in build/reference/xml. A public name without a text is an error, and so is one that no page
names. Whatever a docstring calls "Internal" is left out, as are constructors that copy and move, destructors, assignments and comparisons.
"""
import html
import pathlib
import re
import textwrap
import xml.etree.ElementTree

DIRECTIVE = re.compile(r"^::: (\S+)( own)?$", re.MULTILINE)
# Headers that no trainer includes by itself, and names that stand beside public ones: the library's own.
INTERNAL_HEADERS = re.compile(r"gradsync/(collective|kernel|nccl/(?!memory)|engine/(?!options|guard|gradient_norm)|core/(list|shared|unique_handle|always_inline|kernel_registry"
                              r"|collective_tag|forked|text|debug_log|math|requirements|clock|storage_floats)\b|cuda/(passes|device_passes|runtime|staging)|planning/(checked|simulation)"
                              r"|compress/(error_feedback|gathered|staged)|bootstrap/(?!job|rendezvous|tcp_rendezvous|file_rendezvous|mpi_rendezvous)|shard/(shard_|sharded_base|unit_))")
# Members that a concept or a traits type describes: models of it need no text of their own. Not in FACES, which are no models.
CONTRACT = set("abilities describe plan set_ready_seconds attach bucket_full gradients_ready detach gathers_in_forward start traits traffic WorkType Exchange "
               "is_single_rank with_replicas shards_gradients steps_inside stage_pools name state_count begin_step step memory_space all_reduce reduce "
               "reduce_scatter all_gather broadcast gather scatter barrier progress progress_time fail split duplicate allocate timeout set_timeout".split())
FACES = re.compile(r"(Reducer|Sharded\w+|Torch\w+|cxx14::\w+)::")
SCOPES = ("", "cuda::", "plan::", "cxx14::")  # the namespaces that users name
WIDTH = 76


def own_name(qualified):
    """As users write it behind `gradsync::`."""
    return re.sub(r"^(gradsync::)?(v0_\d+::)?", "", qualified)


def plain(element):
    return " ".join("".join(element.itertext()).split()) if element is not None else ""


def tidy(code):
    """C++ as the project formats it: Doxygen puts blanks elsewhere."""
    code = re.sub(r"\s+", " ", code).strip()
    code = re.sub(r"\bgradsync::(v0_\d+::)?", "", code)
    code = re.sub(r"(\w|>|\)) ([&*]+(?:\.\.\.)?)(?=\w)", r"\1\2 ", code)
    code = re.sub(r"(\w|>) ([&*]+(?:\.\.\.)?)(?=[\s,)>]|$)", r"\1\2", code)
    code = re.sub(r"(?<=[\w:]) ?<\s+|(?<=template)<", "<", code).replace("template<", "template <")
    return re.sub(r"\s+>(?! ?[\d=])", ">", code).replace("}<< ", "} << ").strip()


def wrapped(head, arguments, tail):
    """A list of arguments in one line, or with a line for each."""
    line = head + ", ".join(arguments) + tail
    if len(line) <= WIDTH: return line
    inner = ", ".join(arguments)
    return f"{head}\n    " + (inner if len(inner) + 4 <= WIDTH else ",\n    ".join(arguments)) + tail


class Entity:
    """Something with a name: a compound, a member of one, or a function."""

    def __init__(self, element, kind, name, owner=None):
        self.element, self.kind, self.name, self.owner = element, kind, name, owner
        self.id, self.members = element.get("id"), []
        location = element.find("location")
        self.file, self.line = (location.get("file"), int(location.get("line"))) if location is not None else ("", 0)
        self.brief, self.details = element.find("briefdescription"), element.find("detaileddescription")
        text = plain(self.brief) + plain(self.details)
        self.documented, self.internal, self.shares = bool(text), text.startswith("Internal"), False

    @property
    def short(self): return self.name.rpartition("::")[2]

    @property
    def anchor(self): return self.name.replace("::", ".").replace("operator ", "operator-").replace("()", "call").replace("[]", "at").replace("*", "star")

    @property
    def trivial(self):
        """Says what every reader of C++ knows, or is not for users."""
        arguments = self.element.findtext("argsstring") or ""
        if self.kind == "friend" or "=delete" in arguments.replace(" ", "") or self.short.startswith("~"): return True
        if re.match(r"operator(=|==|\+=|<=>)$", self.short): return True
        if self.kind == "function" and self.owner and self.short == self.owner.short:
            own = re.escape(self.short)
            return not self.documented and bool(re.match(rf"\((const )?{own}(<.*?>)? ?&{{1,2}}\w*\)|\((const )?{own}\)|\(\)", tidy(arguments).replace("& ", "&")))
        return self.short == "operator bool" and not self.documented

    def template(self):
        parameters = []
        for parameter in self.element.findall("templateparamlist/param"):
            text = " ".join(filter(None, (plain(parameter.find("type")), parameter.findtext("declname"))))
            if (value := parameter.find("defval")) is not None: text += f" = {plain(value)}"
            parameters.append(tidy(text))
        if not parameters: return ""
        requires = self.element.find("requiresclause")
        return wrapped("template <", parameters, ">\n") + (f"    requires {plain(requires).replace('< ', '<').replace(' >', '>')}\n" if requires is not None else "")

    def signature(self):
        e = self.element
        if self.kind in ("class", "struct"): return f"{self.template()}{self.kind} {self.short};"
        if self.kind == "concept":
            return f"{self.template()}concept {self.short};"
        if self.kind == "enum": return f"enum class {self.short};"
        kind = tidy(plain(e.find("type")))
        value = e.find("initializer")
        value = tidy(plain(value)) if value is not None else ""
        if self.kind == "typedef": return f"{self.template()}using {self.short} = {kind};"
        if self.kind == "variable":
            static = "static " * (e.get("static") == "yes")
            constant = "constexpr " * (e.get("constexpr") == "yes" and "constexpr" not in kind)
            shown = f" {value}" if value and len(value) <= 60 and not value.startswith("{") else value.replace("{}", "") if len(value) < 30 else ""
            return f"{self.template()}{static}{constant}{kind} {self.short}{shown};"
        arguments = [tidy(" ".join(filter(None, (plain(p.find("type")), p.findtext("declname"), p.findtext("array")))) +
                          (f" = {plain(p.find('defval'))}" if p.find("defval") is not None else "")) for p in e.findall("param")]
        tail = tidy((e.findtext("argsstring") or "").rpartition(")")[2])
        tail = re.sub(r"\s*->.*|\s*=\s*(default|0)", "", tail) + " = 0" * (e.get("virt") == "pure-virtual")
        result = re.search(r"->.*", tidy(e.findtext("argsstring") or "").rpartition(")")[2])
        words = ["virtual"] * (e.get("virt") == "pure-virtual") + ["static"] * (e.get("static") == "yes") + ["explicit"] * (e.get("explicit") == "yes") + ["constexpr"] * (e.get("constexpr") == "yes" and "constexpr" not in kind)
        head = " ".join([*words, *([kind] if kind and not self.short.startswith("operator ") else []), self.short])
        return self.template() + wrapped(f"{head}(", arguments, ")" + (f" {tail}" if tail else "") + (f" {result[0]}" if result else "") + ";")


class Reference:
    """All that Doxygen found, and where the pages describe it."""

    def __init__(self, folder):
        self.entities, self.functions, self.places, self.described_now = {}, {}, {}, ""
        for path in sorted(pathlib.Path(folder).glob("*.xml")):
            if not path.name.startswith(("class", "struct", "concept", "namespacegradsync")): continue
            compound = xml.etree.ElementTree.parse(path).getroot().find("compounddef")
            if compound.get("kind") == "namespace": self.read_namespace(compound)
            else: self.read_compound(compound)
        for guide in self.functions.keys() & self.entities.keys(): del self.functions[guide]

    def read_compound(self, compound):
        if not compound.findtext("compoundname").startswith("gradsync::") or compound.get("prot", "public") != "public": return
        entity = self.add(Entity(compound, compound.get("kind"), own_name(compound.findtext("compoundname"))))
        for member in compound.iter("memberdef"):
            if member.get("prot") == "public" and member.get("kind") in ("function", "variable", "typedef", "enum"):
                name = tidy(member.findtext("name"))
                if not plain(member.find("type")) and not re.match("operator|~", name): name = entity.short  # an inherited constructor, too
                entity.members.append(Entity(member, member.get("kind"), f"{entity.name}::{name}", entity))
        entity.members.sort(key=lambda m: (m.file != entity.file, m.file, m.line))
        for before, member in zip(entity.members, entity.members[1:]):  # `int a, b;` has one text
            if (before.file, before.line, before.kind) == (member.file, member.line, "variable") and not member.documented:
                member.documented, member.internal, member.shares = before.documented, before.internal, True

    def read_namespace(self, compound):
        scope = own_name(compound.findtext("compoundname") + "::")
        for member in compound.iter("memberdef"):
            entity = Entity(member, member.get("kind"), scope + own_name(member.findtext("name")))
            if entity.kind == "function": self.functions.setdefault(entity.name, []).append(entity)
            elif entity.kind in ("variable", "typedef", "enum") and "<" not in entity.name: self.add(entity)

    def add(self, entity):
        return self.entities.setdefault(entity.name, entity)

    def assign(self, page, markdown):
        """Remembers which page describes what. Returns the names that there are not."""
        unknown = []
        for name, own in DIRECTIVE.findall(markdown):
            if name in self.functions: found = self.functions[name]
            elif name in self.entities: found = [self.entities[name]]
            else: unknown.append(name); continue
            for entity in found:
                for e in [entity, *self.shown(entity, bool(own))]:
                    self.places.setdefault(e.id, (page, e.anchor))
                    self.places.setdefault(f"name {e.name}", (page, e.anchor))
                    for value in e.element.findall("enumvalue"): self.places.setdefault(value.get("id"), (page, e.anchor))
        return unknown

    def headers(self, pages):
        """The headers of all that the pages describe."""
        return sorted({e.file for markdown in pages.values() for name, _ in DIRECTIVE.findall(markdown) for e in self.functions.get(name) or [self.entities[name]] if e.file})

    def shown(self, entity, own=False):
        members = [m for m in entity.members if not m.internal and not m.trivial and not (own and m.file != entity.file)
                   and (m.documented or m.short not in CONTRACT or FACES.match(m.name))]
        for name, nested in self.entities.items():
            if name.rpartition("::")[0] == entity.name and nested.documented and not nested.internal and entity.kind in ("class", "struct"): members.append(nested)
        return members

    def mistakes(self, pages):
        """Public names without a text, and those that no page names."""
        for name, own in (d for markdown in pages.values() for d in DIRECTIVE.findall(markdown)):
            found = self.functions.get(name) or [self.entities[name]]
            documented = any(e.documented for e in found)
            for entity in found:
                if not documented: yield f"{entity.file}:{entity.line}: {name} has no text"
                texts = {m.name for m in entity.members if m.documented}
                for m in self.shown(entity, bool(own)):
                    if m.name not in texts and not m.documented: yield f"{m.file}:{m.line}: {m.name} has no text"
                for value in (v for e in [entity, *self.shown(entity, bool(own))] for v in e.element.findall("enumvalue")):
                    if not entity.documented: yield f"{entity.file}:{entity.line}: {name}::{value.findtext('name')} has no text"
        for name, entity in [*self.entities.items(), *((n, f[0]) for n, f in self.functions.items())]:
            scope = name.rpartition("::")[0]
            if (f"{scope}::" if scope else "") not in SCOPES or entity.internal or INTERNAL_HEADERS.match(entity.file) or "<" in name: continue
            if f"name {name}" not in self.places: yield f"{entity.file}:{entity.line}: no page of docs/api/ names {name}; or begin its docstring with \"Internal\""

    # ------------------------------------------------------------------------------------------------------- as Markdown

    def written(self, page, markdown):
        return DIRECTIVE.sub(lambda found: self.section(page, found[1], bool(found[2])), markdown)

    def section(self, page, name, own):
        entities = self.functions.get(name) or [self.entities[name]]
        first = entities[0]
        text = [self.heading(2, first)]
        if first.file: text.append(f"`#include <{first.file}>` "
                                    f'<a class="source" href="../files/include/{first.file}.html#__codelineno-0-{first.line}">source</a>')
        text += [self.described(page, e) for e in entities]
        for entity in entities:
            members = self.shown(entity, own)
            fields = [m for m in members if m.kind in ("variable", "typedef") and m.owner]
            if fields: text.append(self.fields(page, fields))
            functions = {}
            for m in members:
                if m not in fields: functions.setdefault(m.name, []).append(m)
            for overloads in functions.values():
                text.append(self.heading(3, overloads[0]))
                text += [self.described(page, m) for m in overloads]
                text += [self.fields(page, nested) for m in overloads if m.kind in ("class", "struct") and (nested := [n for n in self.shown(m) if n.kind == "variable"])]
        return "\n\n".join(filter(None, text)) + "\n"

    def heading(self, level, entity):
        called = "()" * (entity.kind == "function")
        label = html.escape(entity.short + called).replace("*", "&#42;")
        owner = entity.name.rpartition("::")[0]
        shown = f'<span class="owner">{html.escape(owner)}::</span>{label}' if owner else label
        return f'{"#" * level} {shown} {{: #{entity.anchor} data-toc-label="{label}" }}'

    def described(self, page, entity):
        signature = entity.signature()
        values = entity.element.findall("enumvalue")
        text = [f"```cpp\n{signature}\n```"]
        text += self.blocks(page, entity)
        if len(text) == 2 and re.match("[a-z]", text[1]): text[1] = text[1][0].upper() + text[1][1:] + "." * (text[1][-1] not in ".:`")  # a comment behind code
        for v in values:
            meaning = " ".join(filter(None, (self.inline(page, p) for d in ("briefdescription", "detaileddescription") for p in v.findall(f"{d}/para"))))
            text.append(f"- `{v.findtext('name')}`" + (f": {meaning}" if meaning else ""))
        lists = [t for t in text if t.startswith("- ") and "\n" not in t]
        if values: text = [t for t in text if t not in lists] + ["\n".join(lists)]
        return "\n\n".join(text)

    def fields(self, page, members):
        """A definition list."""
        lines = []
        for i, m in enumerate(members):
            lines.append(f"`{tidy(m.signature().rstrip(';'))}`{{: #{m.anchor} }}")
            if i + 1 < len(members) and members[i + 1].shares: continue
            first = next(n for n in reversed(members[:i + 1]) if not n.shares)
            lines.append(f"\n:   {textwrap.indent((chr(10) * 2).join(self.blocks(page, first, joined=True)), '    ').strip()}\n")
        return "\n".join(lines)

    def blocks(self, page, entity, joined=False):
        """The docstring as blocks of Markdown."""
        self.described_now = entity.name
        found = [b for part in (entity.brief, entity.details) if part is not None for p in part for b in self.block(page, p)]
        if joined and len(found) > 1 and not found[1].startswith(("-", "`", "|", "1.")): found[:2] = [f"{found[0]} {found[1]}"]
        return found

    def block(self, page, element):
        if element.tag != "para": return [self.inline(page, element)]
        blocks, line = [], [element.text or ""]
        line[0] = self.escaped(line[0])

        def flush():
            if text := " ".join("".join(line).split()): blocks.append(text)
            line.clear()

        for child in element:
            if child.tag in ("verbatim", "programlisting", "preformatted"):
                flush()
                blocks.append(f"```cpp\n{self.code(child)}\n```")
            elif child.tag in ("itemizedlist", "orderedlist"):
                flush()
                mark = "-" if child.tag == "itemizedlist" else "1."
                items = ["\n\n".join(b for p in item for b in self.block(page, p)) for item in child.findall("listitem")]
                blocks.append("\n".join(f"{mark} " + textwrap.indent(i, "    ").strip() for i in items))
            elif child.tag == "table":
                flush()
                rows = [[" ".join(self.inline(page, p) for p in entry).replace("|", "&#124;") for entry in row.findall("entry")] for row in child.findall("row")]
                blocks.append("\n".join("| " + " | ".join(r) + " |" for r in [rows[0], ["---"] * len(rows[0]), *rows[1:]]))
            elif child.tag == "simplesect":
                flush()
                blocks.append({"return": "Returns ", "note": "Note: "}.get(child.get("kind"), "") + " ".join(self.inline(page, p) for p in child))
            else: line.append(self.piece(page, child))
            line.append(self.escaped(child.tail or ""))
        flush()
        return blocks

    @staticmethod
    def code(element):
        lines = ["".join(" " if e.tag == "sp" else "" for e in ()) + Reference.code_line(l) for l in element.findall("codeline")]
        return "\n".join(lines) if lines else textwrap.dedent("".join(element.itertext())).strip("\n")

    @staticmethod
    def code_line(element):
        text = element.text or ""
        for child in element: text += (" " if child.tag == "sp" else Reference.code_line(child)) + (child.tail or "")
        return text

    @staticmethod
    def escaped(text):
        return re.sub(r"([\\`*_\[\]{}|])", r"\\\1", text).replace("<", "&lt;").replace("\\|", "&#124;")

    def inline(self, page, element):
        return " ".join((self.escaped(element.text or "") + "".join(self.piece(page, c) + self.escaped(c.tail or "") for c in element)).split())

    def link(self, page, place, text):
        """A link, unless it would lead to where it stands."""
        file, anchor = place
        if anchor in (self.described_now, self.described_now.rpartition("::")[0]): return text
        return f"[{text}]({'' if file == page else file.rpartition('/')[2]}#{anchor})"

    def place_of(self, code):
        """Of what a docstring names as a member of its own class, or in full."""
        name = re.sub(r"[({<].*", "", code.removeprefix("gs::"))
        owners = [self.described_now, self.described_now.rpartition("::")[0]]
        return next((place for owner in owners if (place := self.places.get(f"name {owner}::{name}"))), self.places.get(f"name {name}") if re.match(r"[A-Z]|\w+::", name) else None)

    def piece(self, page, element):
        inner = self.escaped(element.text or "") + "".join(self.piece(page, c) + self.escaped(c.tail or "") for c in element)
        if element.tag == "ref":
            place = self.places.get(element.get("refid"))
            return self.link(page, place, inner) if place else inner
        if element.tag == "computeroutput":
            shown = f"<code>{html.escape(''.join(element.itertext()), quote=False).replace('*', '&#42;').replace('_', '&#95;').replace('[', '&#91;')}</code>"
            ref = element.find("ref")
            place = self.places.get(ref.get("refid")) if ref is not None else self.place_of("".join(element.itertext()))
            return self.link(page, place, shown) if place else shown
        if element.tag in ("bold", "emphasis"): return f"**{inner}**" if element.tag == "bold" else f"*{inner}*"
        if element.tag == "ulink": return f"[{inner}]({element.get('url')})"
        entities = {"ndash": "–", "mdash": "—", "sp": " ", "linebreak": "\n", "nonbreakablespace": " ", "lsquo": "‘", "rsquo": "’", "ldquo": "“", "rdquo": "”"}
        return entities.get(element.tag, inner)
