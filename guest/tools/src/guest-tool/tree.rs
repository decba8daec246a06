//! Writes a tree of files that resembles kernel source but is smaller.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use guest_tools::content::Bytes;

/// Median file size. Linux 6.12 has 86,000 files of 16 KiB on average, and half of them are smaller
/// than 4.6 KiB. The logarithms of sizes are about normally distributed. This median and this
/// deviation result in that average.
const MEDIAN_BYTES: f64 = 4600.0;
const DEVIATION: f64 = 1.58;
const MAX_BYTES: f64 = 1024.0 * 1024.0;
/// Files per directory. A directory in Linux has 16 files on average. With three levels of such
/// directories, the tree has the usual depth.
const FILES_PER_DIRECTORY: u64 = 16;
const DIRECTORIES_PER_LEVEL: u64 = 12;

/// Creates a tree of `files` files from a seed, and prints its size in bytes.
pub(crate) fn write(dir: &Path, seed: u64, files: u64) -> Result<()> {
    let mut numbers = Bytes::new(seed);
    let mut total = 0;
    for number in 0..files {
        let path = dir.join(place(number));
        fs::create_dir_all(path.parent().expect("files are in directories"))?;
        let len = size(&mut numbers);
        fs::write(&path, text(&mut numbers, len))
            .with_context(|| format!("Cannot write {}", path.display()))?;
        total += len;
    }
    println!("{total}");
    Ok(())
}

fn place(number: u64) -> PathBuf {
    let directory = number / FILES_PER_DIRECTORY;
    let (upper, lower) = (directory / DIRECTORIES_PER_LEVEL, directory % DIRECTORIES_PER_LEVEL);
    format!(
        "{:02}/{:02}/{lower:02}/source-{number:05}.c",
        upper / DIRECTORIES_PER_LEVEL,
        upper % DIRECTORIES_PER_LEVEL
    )
    .into()
}

fn size(numbers: &mut Bytes) -> usize {
    // The sum of twelve numbers between 0 and 1 is nearly normally distributed, with deviation 1.
    let sum: f64 = (0..12).map(|_| numbers.next_u64() as f64 / u64::MAX as f64).sum();
    (MEDIAN_BYTES * (DEVIATION * (sum - 6.0)).exp()).min(MAX_BYTES) as usize
}

/// Returns letters and line ends, which compress a little. None of the tested file systems compress
/// data.
fn text(numbers: &mut Bytes, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.next_multiple_of(8)];
    numbers.fill(&mut bytes);
    bytes.truncate(len);
    for byte in &mut bytes {
        *byte = if *byte < 8 { b'\n' } else { b'a' + *byte % 26 };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_match_a_kernel_tree() {
        let mut numbers = Bytes::new(1);
        let mut sizes: Vec<usize> = (0..20_000).map(|_| size(&mut numbers)).collect();
        sizes.sort_unstable();
        let mean = sizes.iter().sum::<usize>() / sizes.len();
        assert!((13_000..19_000).contains(&mean), "mean {mean}");
        assert!((4300..4900).contains(&sizes[10_000]), "median {}", sizes[10_000]);
    }

    #[test]
    fn files_have_distinct_paths() {
        let places: std::collections::BTreeSet<_> = (0..5000).map(place).collect();
        assert_eq!(places.len(), 5000);
    }
}
