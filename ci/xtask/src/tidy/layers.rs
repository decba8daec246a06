//! Checks the direction of dependencies between the modules of a crate. docs/design/architecture.md
//! lists the layers from top to bottom. A module may use modules of its own layer and of lower
//! layers.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::repository::Repository;

/// Document with the tables of layers.
const DOCUMENT: &str = "docs/design/architecture.md";
/// Prefix of a table's header row.
const TABLE_HEAD: &str = "| Layer | Modules |";
/// Modules whose layers a table lists.
struct Tree {
    /// Heading above the table.
    heading: &'static str,
    /// Folders with the modules.
    folders: &'static [&'static str],
    /// Path from the crate to the parent of these modules.
    parents: &'static [&'static str],
}

const VMM: Tree =
    Tree { heading: "### VMM", folders: &["vmm/devices/src/", "vmm/src/"], parents: &[] };
const POOL: Tree = Tree {
    heading: "### `pmem-volume`: `pool`",
    folders: &["pmem-volume/src/pool/"],
    parents: &["pool"],
};
const TREES: [Tree; 5] = [
    VMM,
    Tree { heading: "### VMM: `vm`", folders: &["vmm/src/vm/"], parents: &["vm"] },
    Tree { heading: "### `pmem-volume`", folders: &["pmem-volume/src/"], parents: &[] },
    POOL,
    Tree { heading: "### `balloon`", folders: &["balloon/src/"], parents: &[] },
];

/// First segments of paths that lead to a module.
const ROOT_PATHS: [&str; 2] = ["crate", "foreshore_devices"];
/// Files that are not modules themselves: they list the modules or start the program.
const ROOTS: [&str; 3] = ["lib", "main", "mod"];
const PROGRAMS: &str = "bin";

/// Line that begins the diagram in the document.
const DRAWING_FENCE: &str = "```mermaid\n";

/// Returns uses of upper layers by lower ones in `sources`, pairs of path and text.
pub(super) fn violations(
    repository: &Repository,
    sources: &[(String, String)],
) -> Result<Vec<String>> {
    let document = repository.read(DOCUMENT)?.unwrap_or_default();
    let mut violations = Vec::new();
    for tree in &TREES {
        let layers = Layers::read(&document, tree)?;
        let sources = parse(tree, sources);
        violations.extend(in_sources(&layers, &sources));
        let is_missing = |module: &&String| sources.iter().all(|source| source.name != **module);
        let missing = layers.modules.keys().filter(is_missing);
        violations
            .extend(missing.map(|module| format!("{DOCUMENT}:1: module {module} does not exist")));
    }
    let shown = document.split_once(DRAWING_FENCE).and_then(|(_, rest)| rest.split_once("```"));
    let drawn = draw_vmm(&document, sources)?;
    if shown.is_none_or(|(shown, _)| shown != drawn) {
        let remedy = "`cargo xtask draw-layers` prints it";
        violations.push(format!("{DOCUMENT}:1: the drawing is out of date: {remedy}"));
    }
    Ok(violations)
}

/// Returns a Mermaid diagram of the VMM's layers and of the dependencies between them.
pub(super) fn drawing(repository: &Repository, sources: &[(String, String)]) -> Result<String> {
    draw_vmm(&repository.read(DOCUMENT)?.unwrap_or_default(), sources)
}

fn draw_vmm(document: &str, sources: &[(String, String)]) -> Result<String> {
    Ok(draw(&Layers::read(document, &VMM)?, &parse(&VMM, sources)))
}

#[derive(Debug)]
struct Layers {
    names: Vec<String>,
    /// Index of the layer that contains each module.
    modules: BTreeMap<String, usize>,
}

impl Layers {
    fn read(document: &str, tree: &Tree) -> Result<Self> {
        let heading = tree.heading;
        let section = document.lines().skip_while(|line| *line != heading).skip(1);
        let section = section.take_while(|line| !line.starts_with('#'));
        let rows = section.skip_while(|line| !line.starts_with(TABLE_HEAD)).skip(2);
        let (mut names, mut modules) = (Vec::new(), BTreeMap::new());
        for row in rows.take_while(|line| line.starts_with('|')) {
            let mut cells = row.split('|').skip(1);
            let (name, cell) = (cells.next().unwrap_or_default(), cells.next().unwrap_or_default());
            let own = cell.split('`').skip(1).step_by(2);
            for module in own {
                let earlier = modules.insert(module.to_owned(), names.len());
                ensure!(earlier.is_none(), "{DOCUMENT} has two layers for {module} in {heading}");
            }
            names.push(name.trim().to_owned());
        }
        ensure!(!names.is_empty(), "{DOCUMENT} has no table {TABLE_HEAD} in {heading}");
        Ok(Self { names, modules })
    }
}

/// Draws the layers, and an arrow for each dependency that other arrows do not imply.
fn draw(layers: &Layers, sources: &[Module<'_>]) -> String {
    let mut arrows = BTreeSet::new();
    for module in sources {
        let Some(from) = layers.modules.get(module.name) else { continue };
        let used = module.source.uses.iter().filter_map(|(_, used)| layers.modules.get(used));
        arrows.extend(used.filter(|to| *to > from).map(|to| (*from, *to)));
    }
    let mut lines = vec!["flowchart TD".to_owned()];
    let names = layers.names.iter().enumerate();
    lines.extend(names.map(|(layer, name)| format!("    L{layer}[\"{name}\"]")));
    let is_implied = |from, to| reaches(&arrows, from, to, true);
    let shown = arrows.iter().filter(|(from, to)| !is_implied(*from, *to));
    lines.extend(shown.map(|(from, to)| format!("    L{from} --> L{to}")));
    lines.join("\n") + "\n"
}

/// Returns true if arrows lead from one layer to another. With `is_indirect`, only paths over other
/// layers count.
fn reaches(arrows: &BTreeSet<(usize, usize)>, from: usize, to: usize, is_indirect: bool) -> bool {
    let mut next = arrows.range((from, 0)..(from + 1, 0)).map(|(_, next)| *next);
    next.any(|next| (next == to && !is_indirect) || (next < to && reaches(arrows, next, to, false)))
}

/// Module file that is not only compiled for tests.
struct Module<'a> {
    path: &'a str,
    name: &'a str,
    source: Source,
}

impl Tree {
    /// Returns `path` relative to the folder that contains it.
    fn within<'a>(&self, path: &'a str) -> Option<&'a str> {
        self.folders.iter().find_map(|folder| path.strip_prefix(folder))
    }
}

fn parse<'a>(tree: &Tree, sources: &'a [(String, String)]) -> Vec<Module<'a>> {
    let parsed: Vec<_> = sources
        .iter()
        .filter_map(|(path, text)| {
            let name = tree.within(path)?.split(['/', '.']).next()?;
            (name != PROGRAMS).then(|| Module {
                path,
                name,
                source: Source::parse(tree, path, text),
            })
        })
        .collect();
    let test_files: BTreeSet<_> =
        parsed.iter().flat_map(|module| module.source.test_files(tree, module.path)).collect();
    let is_test = |path: &str| {
        let stem = path.trim_end_matches(".rs");
        test_files.iter().any(|test| {
            stem.strip_prefix(test.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    };
    let (roots, mut modules): (Vec<_>, Vec<_>) =
        parsed.into_iter().partition(|module| ROOTS.contains(&module.name));
    modules.retain(|module| !is_test(module.path));
    let names: BTreeSet<_> = modules.iter().map(|module| module.name).collect();
    let exports = roots.into_iter().flat_map(|root| root.source.exports);
    let exports: BTreeMap<_, _> =
        exports.filter(|(_, module)| names.contains(module.as_str())).collect();
    for (_, used) in modules.iter_mut().flat_map(|module| &mut module.source.uses) {
        if let Some(module) = exports.get(used) {
            used.clone_from(module);
        }
    }
    modules
}

fn in_sources(layers: &Layers, sources: &[Module<'_>]) -> Vec<String> {
    let mut violations = Vec::new();
    for Module { path, name, source } in sources {
        let Some(own) = layers.modules.get(*name) else {
            violations.push(format!("{path}:1: {DOCUMENT} has no layer for {name}"));
            continue;
        };
        let is_above = |used: &String| layers.modules.get(used).is_some_and(|layer| layer < own);
        let upward = source.uses.iter().filter(|(_, used)| is_above(used));
        violations.extend(upward.map(|(line, used)| {
            format!("{path}:{line}: {name} uses {used}, which is in a layer above it in {DOCUMENT}")
        }));
    }
    violations
}

/// Names in a file, except those in items that are compiled only for tests.
#[derive(Debug, Default)]
struct Source {
    /// Line and first name of each path that begins at the root of the tree.
    uses: Vec<(usize, String)>,
    /// Modules in separate files that are compiled only for tests: name, and path if one is given.
    test_modules: Vec<(String, Option<String>)>,
    /// Names that `pub use` exports, and the module of each.
    exports: Vec<(String, String)>,
    /// Number of `super` steps from the file to the root.
    depth: usize,
    /// Path from the crate to the root.
    parents: &'static [&'static str],
}

impl Source {
    /// Parses a file. A file with a syntax error has no names, because the compiler reports the
    /// error.
    fn parse(tree: &Tree, path: &str, text: &str) -> Self {
        let stem = tree.within(path).unwrap_or(path);
        let stem = stem.trim_end_matches(".rs").trim_end_matches("/mod");
        let (depth, parents) = (stem.split('/').count(), tree.parents);
        let mut source = Self { depth, parents, ..Self::default() };
        source.add(text.parse().unwrap_or_default());
        source
    }

    fn add(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                TokenTree::Punct(hash)
                    if hash.as_char() == '#' && is_test_attribute(tokens.get(at)) =>
                {
                    at = self.skip_test_item(&tokens, at + 1);
                }
                TokenTree::Ident(start) if start == "use" && is_public(&tokens[..at - 1]) => {
                    self.add_exports(&tokens[at..]);
                }
                TokenTree::Ident(root) if ROOT_PATHS.iter().any(|path| root == path) => {
                    at = self.add_path(&tokens, at, self.parents);
                }
                TokenTree::Ident(parent) if parent == "super" => {
                    let supers = tokens[at - 1..].iter().step_by(3);
                    let is_super = |token: &&TokenTree| token.to_string() == "super";
                    let count = supers.take_while(is_super).count();
                    at += 3 * (count - 1);
                    if count == self.depth {
                        at = self.add_path(&tokens, at, &[]);
                    }
                }
                TokenTree::Group(group) => self.add(group.stream()),
                _ => {}
            }
        }
    }

    /// Adds the names that a `pub use` exports. `tokens` begin after the word `use`.
    fn add_exports(&mut self, tokens: &[TokenTree]) {
        let end = tokens.iter().position(|token| token.to_string() == ";");
        let Some((TokenTree::Ident(module), names)) = tokens[..end.unwrap_or(0)].split_first()
        else {
            return;
        };
        let mut names = names.to_vec();
        while let Some(name) = names.pop() {
            match name {
                TokenTree::Ident(name) => {
                    self.exports.push((name.to_string(), module.to_string()));
                }
                TokenTree::Group(group) => names.extend(group.stream()),
                _ => {}
            }
        }
    }

    /// Skips an item that is compiled only for tests. `at` is the position after its first
    /// attribute.
    fn skip_test_item(&mut self, tokens: &[TokenTree], mut at: usize) -> usize {
        const ITEMS: [&str; 9] =
            ["const", "enum", "fn", "impl", "mod", "static", "struct", "trait", "use"];
        let (mut path, mut name, mut is_item) = (None, None, false);
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket => {
                    path = path.or_else(|| path_attribute(group.stream()));
                }
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => return at,
                TokenTree::Ident(word) if ITEMS.iter().any(|item| word == item) => {
                    is_item = true;
                    if word == "mod" {
                        name = tokens.get(at).map(ToString::to_string);
                    }
                }
                // The item is a field, a match arm or an argument.
                TokenTree::Punct(end) if end.as_char() == ',' && !is_item => return at,
                TokenTree::Punct(end) if end.as_char() == ';' => break,
                _ => {}
            }
        }
        self.test_modules.extend(name.map(|name| (name, path)));
        at
    }

    /// Adds the names after `::` and the path `parents`. Returns the position after them.
    fn add_path(&mut self, tokens: &[TokenTree], at: usize, parents: &[&str]) -> usize {
        let is_mark = |token: Option<&TokenTree>, mark| matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == mark);
        if !is_mark(tokens.get(at), ':') || !is_mark(tokens.get(at + 1), ':') {
            return at;
        }
        if let Some(TokenTree::Group(group)) = tokens.get(at + 2) {
            let paths: Vec<_> = group.stream().into_iter().collect();
            for path in paths.split(|token| is_mark(Some(token), ',')) {
                self.add_name(path, 0, parents);
            }
            return at + 3;
        }
        self.add_name(tokens, at + 2, parents)
    }

    /// Adds the name at `at`. If the path `parents` begins there, adds the names after it instead.
    fn add_name(&mut self, tokens: &[TokenTree], at: usize, parents: &[&str]) -> usize {
        match (tokens.get(at), parents) {
            (Some(TokenTree::Ident(name)), []) => {
                self.uses.push((name.span().start().line, name.to_string()));
            }
            (Some(TokenTree::Ident(name)), [parent, rest @ ..]) if name == parent => {
                return self.add_path(tokens, at + 1, rest);
            }
            _ => {}
        }
        at + 1
    }

    /// Returns the files of this file's test modules, without extension.
    fn test_files(&self, tree: &Tree, path: &str) -> Vec<String> {
        let stem = path.trim_end_matches(".rs");
        let folder = stem.rsplit_once('/').map_or("", |(folder, _)| folder);
        // The files of a module are in the folder named after it. A mod.rs file is itself in that
        // folder.
        let own =
            if stem.ends_with("/mod") || tree.within(stem) == Some("lib") { folder } else { stem };
        let file = |(name, path): &(String, Option<String>)| match path {
            Some(path) => format!("{folder}/{}", path.trim_end_matches(".rs")),
            None => format!("{own}/{name}"),
        };
        self.test_modules.iter().map(file).collect()
    }
}

/// Returns true if `tokens` end with `pub` or `pub(crate)`.
fn is_public(tokens: &[TokenTree]) -> bool {
    let is_scope = |token: &TokenTree| matches!(token, TokenTree::Group(_));
    let visibility = tokens.iter().rev().find(|token| !is_scope(token));
    visibility.is_some_and(|token| token.to_string() == "pub")
}

/// Returns true for `[cfg(test)]`, and for the attribute of fakes that tests of other crates use.
fn is_test_attribute(token: Option<&TokenTree>) -> bool {
    let Some(TokenTree::Group(group)) = token else { return false };
    let text: String = group.stream().into_iter().map(|token| token.to_string()).collect();
    let text: String = text.split_whitespace().collect();
    text == "cfg(test)" || text == "cfg(any(test,feature=\"testing\"))"
}

fn path_attribute(attribute: TokenStream) -> Option<String> {
    let mut tokens = attribute.into_iter().map(|token| token.to_string());
    let is_path = tokens.next()? == "path" && tokens.next()? == "=";
    is_path.then(|| tokens.next()).flatten().map(|path| path.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# Architecture

### `pmem-volume`: `pool`

| Layer | Modules |
|---|---|
| opening | `open` |
| file | `file` |

### VMM

| Layer | Modules | Purpose |
|---|---|---|
| machine | `vm` | composition |
| devices | `virtio`, `serial` | |
| base | `log` | |

| `other` | `log` |
";

    fn faults(sources: &[(&str, &str)]) -> Vec<String> {
        faults_in(&VMM, sources)
    }

    fn faults_in(tree: &Tree, sources: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<_> =
            sources.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        in_sources(&Layers::read(PAGE, tree).unwrap(), &parse(tree, &sources))
    }

    #[test]
    fn layers_are_the_rows_of_one_table() {
        let layers = Layers::read(PAGE, &VMM).unwrap();
        let expected = [("log", 2), ("serial", 1), ("virtio", 1), ("vm", 0)];
        assert_eq!(
            layers.modules,
            BTreeMap::from(expected.map(|(name, at)| (name.to_owned(), at)))
        );
        assert_eq!(layers.names, ["machine", "devices", "base"]);
        assert!(Layers::read(&PAGE.replace("### VMM", "### Other"), &VMM).is_err());
        let twice = PAGE.replace("| base | `log` |", "| base | `log`, `vm` |");
        assert!(twice != PAGE && Layers::read(&twice, &VMM).is_err());
    }

    #[test]
    fn use_of_a_layer_above_is_named_with_its_line() {
        let upward = "\nuse crate::{serial::Port, vm::Machine};\nfn f() { crate::vm::g() }\n";
        let expected =
            "virtio uses vm, which is in a layer above it in docs/design/architecture.md";
        assert_eq!(
            faults(&[("vmm/src/virtio/mod.rs", upward)]),
            [2, 3].map(|line| format!("vmm/src/virtio/mod.rs:{line}: {expected}"))
        );
        let fine = "use crate::{virtio, serial};\nuse crate::vm;\nuse other::vm;";
        assert!(
            faults(&[("vmm/src/vm/mod.rs", fine), ("vmm/src/serial.rs", "use crate::virtio;")])
                .is_empty()
        );
    }

    #[test]
    fn parent_of_a_module_is_the_root() {
        let upward = "use super::vm;";
        assert_eq!(faults(&[("vmm/src/serial.rs", upward)]).len(), 1);
        assert_eq!(faults(&[("vmm/src/serial/a.rs", "use super::super::vm;")]).len(), 1);
        assert!(faults(&[("vmm/src/serial/a.rs", upward)]).is_empty());
    }

    #[test]
    fn submodules_have_their_own_layers() {
        let found = |text| faults_in(&POOL, &[("pmem-volume/src/pool/file/mod.rs", text)]).len();
        for upward in [
            "use crate::pool::open::Open;",
            "use crate::pool::{Pool, open::{self, Open}};",
            "use crate::{CHUNK_BYTES, pool::open};",
            "use super::open;",
        ] {
            assert_eq!(found(upward), 1, "{upward}");
        }
        for fine in ["use crate::open;", "use crate::{open, btt::open};", "use crate::pool::file;"]
        {
            assert_eq!(found(fine), 0, "{fine}");
        }
        let root = [("pmem-volume/src/pool/mod.rs", "use open::Open;")];
        assert!(faults_in(&POOL, &root).is_empty());
    }

    #[test]
    fn use_of_reexported_name_counts_as_use_of_its_module() {
        for (root, used, expected) in [
            ("pub use open::{mode::OpenMode, Other};", "OpenMode", 1),
            ("pub(crate) use open::OpenMode;", "OpenMode", 1),
            ("use open::OpenMode;", "OpenMode", 0),
            ("pub use file::OpenMode; pub struct Pool;", "OpenMode", 0),
            ("pub use other_crate::open;", "open", 1),
        ] {
            let file = format!("use crate::pool::{{Pool, {used}}};");
            let sources = [
                ("pmem-volume/src/pool/mod.rs", root),
                ("pmem-volume/src/pool/open.rs", ""),
                ("pmem-volume/src/pool/file/mod.rs", &file),
            ];
            assert_eq!(faults_in(&POOL, &sources).len(), expected, "{root}");
        }
    }

    #[test]
    fn field_for_tests_hides_nothing_behind_it() {
        let text = "struct A { #[cfg(test)] a: u8, b: crate::vm::B }";
        assert_eq!(faults(&[("vmm/src/serial.rs", text)]).len(), 1);
    }

    #[test]
    fn module_without_layer_is_named() {
        let expected = "vmm/src/new.rs:1: docs/design/architecture.md has no layer for new";
        assert_eq!(
            faults(&[("vmm/src/new.rs", ""), ("vmm/src/lib.rs", "use crate::vm;")]),
            [expected]
        );
    }

    #[test]
    fn code_for_tests_may_use_every_layer() {
        let device = "#[cfg(test)]\nmod tests { use crate::vm; }\n#[cfg(test)]\nuse crate::vm;\n\
                      #[cfg(test)]\nmod fake;\n#[cfg(test)]\n#[path = \"x_tests.rs\"]\nmod more;";
        let upward = "use crate::vm;";
        let files =
            ["vmm/src/serial/fake.rs", "vmm/src/serial/fake/deep.rs", "vmm/src/serial/x_tests.rs"];
        for file in files {
            assert_eq!(
                faults(&[("vmm/src/serial/mod.rs", device), (file, upward)]),
                Vec::<String>::new()
            );
        }
        let other = [("vmm/src/serial/mod.rs", device), ("vmm/src/serial/fakes.rs", upward)];
        assert_eq!(faults(&other).len(), 1);
    }

    #[test]
    fn drawing_has_an_arrow_for_each_use_that_others_do_not_imply() {
        let sources = [("vm", "use crate::{virtio, log};"), ("virtio", "use crate::log;")];
        let sources =
            sources.map(|(module, text)| (format!("vmm/src/{module}/mod.rs"), text.to_owned()));
        let drawing = draw_vmm(PAGE, &sources).unwrap();
        let expected = "flowchart TD\n    L0[\"machine\"]\n    L1[\"devices\"]\n    L2[\"base\"]\n    \
                        L0 --> L1\n    L1 --> L2\n";
        assert_eq!(drawing, expected);
        let direct = draw_vmm(PAGE, &sources[..1]).unwrap();
        assert!(direct.ends_with("    L0 --> L1\n    L0 --> L2\n"), "{direct}");
    }
}
