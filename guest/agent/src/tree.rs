//! Trees of files for tests, with the structure of /proc or /sys.

use std::fs;
use std::path::{Path, PathBuf};

pub(crate) struct Tree(tempfile::TempDir);

impl Tree {
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        let tree = Tree(tempfile::tempdir().expect("tempdir"));
        files.iter().for_each(|(path, text)| tree.put(path, text));
        tree
    }

    /// Creates a fake /sys/devices/system/memory with an onlining policy and blocks of 128 MiB.
    /// `blocks` gives the number, node, state and zones of each block.
    pub(crate) fn memory(policy: &str, blocks: &[(u32, u32, &str, &str)]) -> Self {
        let policy = format!("{policy}\n");
        let tree = Tree::new(&[("auto_online_blocks", &policy), ("block_size_bytes", "8000000\n")]);
        tree.make("power");
        for (number, node, state, zones) in blocks {
            tree.make(&format!("memory{number}/node{node}"));
            tree.put(&format!("memory{number}/state"), format!("{state}\n"));
            tree.put(&format!("memory{number}/valid_zones"), format!("{zones}\n"));
        }
        tree
    }

    /// Creates a fake /proc with texts from guests in tests/data.
    pub(crate) fn proc(texts: &[&str]) -> Self {
        let tree = Tree::new(&[]);
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        for text in texts {
            let (_, name) = text.split_once('/').expect("a guest and a name");
            fs::copy(data.join(text), tree.at(name)).expect("copies");
        }
        tree
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    /// Writes a file, and creates its parent directories.
    pub(crate) fn put(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().expect("has one")).expect("creates");
        fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    pub(crate) fn get(&self, path: &str) -> String {
        fs::read_to_string(self.at(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Creates a directory at `path`, so that writing text to the path fails.
    pub(crate) fn make(&self, path: &str) {
        fs::create_dir_all(self.at(path)).expect("creates");
    }

    pub(crate) fn remove(&self, path: &str) {
        let path = self.at(path);
        fs::remove_file(&path).or_else(|_| fs::remove_dir(&path)).expect("removes");
    }
}
