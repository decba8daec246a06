//! Measures a program's memory bandwidth in several kinds of memory, with McCalpin's four kernels.

use std::io::{self, Write};
use std::path::PathBuf;
use std::ptr;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::mapped::Mapping;

const MIB: usize = 1 << 20;
/// Alignment and unit of the memory in each place (a NUMA node or a file). It is mapped with huge
/// pages if the kernel supports them.
const HUGE_PAGE_BYTES: usize = 2 * MIB;
/// Factor used by `scale` and `triad`.
const SCALAR: f64 = 3.0;
const KERNELS: [&str; 4] = ["copy", "scale", "add", "triad"];

enum Place {
    /// Anonymous memory on one node.
    Node(u32),
    File(PathBuf),
}

impl Place {
    fn parse(text: &str) -> Result<Self> {
        match text.split_once('=') {
            Some(("node", node)) => {
                Ok(Self::Node(node.parse().with_context(|| format!("not a node: {node:?}"))?))
            }
            Some(("file", path)) => Ok(Self::File(path.into())),
            _ => bail!("neither node= nor file=: {text:?}"),
        }
    }
}

/// Mapped memory of a place. It is never unmapped.
enum Memory {
    Anonymous(*mut f64),
    Mapped(Mapping),
}

struct Arrays {
    memory: Memory,
    len: usize,
}

impl Arrays {
    fn new(place: &Place, array_bytes: usize) -> Result<Self> {
        let memory = match place {
            Place::Node(node) => Memory::Anonymous(anonymous(*node, 3 * array_bytes)?),
            Place::File(path) => Memory::Mapped(Mapping::new(path, 0, 3 * array_bytes as u64)?),
        };
        let mut arrays = Self { memory, len: array_bytes / 8 };
        let [a, b, c] = arrays.get();
        a.fill(1.0);
        b.fill(2.0);
        c.fill(0.0);
        if let Place::Node(node) = place {
            arrays.check_node(*node)?;
        }
        Ok(arrays)
    }

    fn start(&self) -> *mut f64 {
        match &self.memory {
            Memory::Anonymous(start) => *start,
            Memory::Mapped(mapping) => mapping.as_ptr().cast(),
        }
    }

    fn get(&mut self) -> [&mut [f64]; 3] {
        // SAFETY: three adjacent arrays in memory owned by this value. They are borrowed mutably,
        // and only once. Every bit pattern is a valid number.
        [0, 1, 2].map(|nth| unsafe {
            std::slice::from_raw_parts_mut(self.start().add(nth * self.len), self.len)
        })
    }

    fn run(&mut self, kernel: &str) {
        let [a, b, c] = self.get();
        match kernel {
            "copy" => c.copy_from_slice(a),
            "scale" => b.iter_mut().zip(c).for_each(|(b, c)| *b = SCALAR * *c),
            "add" => c.iter_mut().zip(a.iter().zip(b)).for_each(|(c, (a, b))| *c = *a + *b),
            _ => a.iter_mut().zip(b.iter().zip(c)).for_each(|(a, (b, c))| *a = *b + SCALAR * *c),
        }
    }

    /// Checks that every element has the value expected after `rounds` rounds, so that no kernel
    /// was skipped.
    fn check(&mut self, rounds: u64) -> Result<()> {
        let (mut expected_a, mut expected_b, mut expected_c) = (1.0f64, 2.0f64, 0.0f64);
        for _ in 0..rounds {
            expected_c = expected_a;
            expected_b = SCALAR * expected_c;
            expected_c = expected_a + expected_b;
            expected_a = expected_b + SCALAR * expected_c;
        }
        for (array, expected) in self.get().into_iter().zip([expected_a, expected_b, expected_c]) {
            let wrong = array.iter().position(|found| *found != expected);
            ensure!(wrong.is_none(), "Element {wrong:?} is not {expected}");
        }
        Ok(())
    }

    /// Checks that every page is on the requested node.
    fn check_node(&self, node: u32) -> Result<()> {
        // Defined in linux/mempolicy.h.
        const MPOL_F_NODE: libc::c_ulong = 1;
        const MPOL_F_ADDR: libc::c_ulong = 2;
        for offset in (0..3 * self.len * 8).step_by(4096) {
            let mut found: libc::c_int = -1;
            let address = self.start() as usize + offset;
            let (mask, mask_bits) = (ptr::null_mut::<libc::c_ulong>(), 0usize);
            let flags = MPOL_F_NODE | MPOL_F_ADDR;
            // SAFETY: the kernel writes one number, and looks up a mapped address.
            let result = unsafe {
                libc::syscall(
                    libc::SYS_get_mempolicy,
                    &raw mut found,
                    mask,
                    mask_bits,
                    address,
                    flags,
                )
            };
            ensure!(result == 0, "get_mempolicy: {}", io::Error::last_os_error());
            ensure!(found == node as libc::c_int, "A page is on node {found}, not {node}");
        }
        Ok(())
    }
}

/// Maps anonymous memory that is allocated only on one node.
fn anonymous(node: u32, bytes: usize) -> Result<*mut f64> {
    // Defined in linux/mempolicy.h.
    const MPOL_BIND: libc::c_int = 2;
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes + HUGE_PAGE_BYTES, prot, flags, -1, 0) };
    ensure!(start != libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
    let aligned = (start as usize).next_multiple_of(HUGE_PAGE_BYTES);
    let mask: libc::c_ulong = 1 << node;
    // SAFETY: the range is part of the new mapping, and the mask has 64 nodes.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, aligned, bytes, MPOL_BIND, &raw const mask, 64usize, 0usize)
    };
    ensure!(result == 0, "mbind to node {node}: {}", io::Error::last_os_error());
    // SAFETY: advice about the same range. It fails if huge pages are not available, and small
    // pages are sufficient then.
    unsafe { libc::madvise(aligned as *mut _, bytes, libc::MADV_HUGEPAGE) };
    Ok(aligned as *mut f64)
}

/// Streams through three arrays of `array_mib` in each place. Places take turns, and each round
/// begins with a different place. Prints a line for each kernel, place and round, with the kernel's
/// name, the number of the place, and microseconds.
pub(crate) fn stream(array_mib: u64, rounds: u64, places: &[&str]) -> Result<()> {
    // Each round multiplies the values by fifteen.
    ensure!((1..=200).contains(&rounds), "rounds is {rounds}, must be 1 to 200");
    ensure!(
        array_mib > 0 && array_mib.is_multiple_of(2),
        "array size is {array_mib} MiB, must be a positive multiple of 2"
    );
    let array_bytes = usize::try_from(array_mib)? * MIB;
    let mut arrays = Vec::new();
    for place in places {
        let opened = Arrays::new(&Place::parse(place)?, array_bytes);
        arrays.push(opened.with_context(|| format!("Cannot allocate arrays at {place}"))?);
    }
    // The first round is not printed, because it allocates pages and fills caches.
    let mut out = String::new();
    for round in 0..=rounds {
        for kernel in KERNELS {
            for turn in 0..arrays.len() {
                let nth = (turn + round as usize) % arrays.len();
                let started = Instant::now();
                arrays[nth].run(kernel);
                let elapsed = started.elapsed();
                if round > 0 {
                    out += &format!("{kernel} {nth} {}\n", elapsed.as_nanos() as f64 / 1e3);
                }
            }
        }
    }
    for (place, arrays) in places.iter().zip(&mut arrays) {
        arrays.check(rounds + 1).with_context(|| format!("Arrays at {place}"))?;
    }
    Ok(io::stdout().write_all(out.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Arrays in memory without a policy, because not every machine allows programs to set one.
    fn arrays(file: &std::path::Path) -> Arrays {
        std::fs::File::create(file).unwrap().set_len(6 * MIB as u64).unwrap();
        Arrays::new(&Place::File(file.to_owned()), 2 * MIB).unwrap()
    }

    #[test]
    fn omitted_kernel_is_detected() {
        let file = std::env::temp_dir().join(format!("guest-tool-stream-{}", std::process::id()));
        let mut all = arrays(&file);
        for _ in 0..2 {
            KERNELS.iter().for_each(|kernel| all.run(kernel));
        }
        all.check(2).unwrap();
        assert!(all.check(1).is_err() && all.check(3).is_err());
        for left_out in KERNELS {
            let mut some = arrays(&file);
            KERNELS
                .iter()
                .filter(|kernel| **kernel != left_out)
                .for_each(|kernel| some.run(kernel));
            assert!(some.check(1).is_err(), "{left_out}");
        }
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn places_are_parsed() {
        assert!(matches!(Place::parse("node=1"), Ok(Place::Node(1))));
        assert!(
            matches!(Place::parse("file=/dev/dax0.0"), Ok(Place::File(path)) if path.ends_with("dax0.0"))
        );
        assert!(Place::parse("node=x").is_err() && Place::parse("dram").is_err());
    }
}
