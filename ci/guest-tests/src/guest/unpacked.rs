//! Unpacks kernels, because on an emulated host, unpacking a bzImage takes a sixth of the time of
//! each boot.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};

use super::Kernel;

/// Folder with kernels that tests have unpacked on this host. If it is not set, guests boot from
/// bzImages.
pub(crate) const VARIABLE: &str = "FORESHORE_TEST_UNPACKED_KERNELS";

/// Locked while a kernel is looked up and unpacked.
static UNPACKING: Mutex<()> = Mutex::new(());

pub(super) fn path_of(kernel: Kernel) -> Result<PathBuf> {
    let Some(folder) = std::env::var_os(VARIABLE).map(PathBuf::from) else {
        return Ok(kernel.path());
    };
    let bzimage = kernel.path();
    unpacked_in(&folder, &bzimage).with_context(|| format!("Cannot unpack {}", bzimage.display()))
}

/// Returns the unpacked kernel in `folder`. Its file name contains the bzImage's length and
/// modification time, so a new bzImage of the same name is unpacked again.
fn unpacked_in(folder: &Path, bzimage: &Path) -> Result<PathBuf> {
    let metadata = fs::metadata(bzimage)?;
    let name = bzimage.file_name().context("The path has no file name")?.to_string_lossy();
    let (bytes, seconds, nanoseconds) = (metadata.len(), metadata.mtime(), metadata.mtime_nsec());
    let path = folder.join(format!("{name}-{bytes}-{seconds}-{nanoseconds}.elf"));
    // A test may start guests on several threads, and they would write the same file.
    let _unpacking = UNPACKING.lock().unwrap_or_else(PoisonError::into_inner);
    if !path.exists() {
        unpack_to(&path, bzimage)?;
    }
    Ok(path)
}

/// Writes to a temporary file first, because another process may do the same concurrently.
fn unpack_to(path: &Path, bzimage: &Path) -> Result<()> {
    let elf = unpack(&fs::read(bzimage)?)?;
    fs::create_dir_all(path.parent().context("The path has no folder")?)?;
    let part = path.with_extension(std::process::id().to_string());
    fs::write(&part, elf)?;
    Ok(fs::rename(&part, path)?)
}

/// Unpacks the payload of a bzImage (Documentation/arch/x86/boot.rst). The last four bytes of the
/// payload are the unpacked size.
fn unpack(bzimage: &[u8]) -> Result<Vec<u8>> {
    const SETUP_SECTORS: usize = 0x1f1;
    const MAGIC: usize = 0x202;
    const PAYLOAD_OFFSET: usize = 0x248;
    const PAYLOAD_BYTES: usize = 0x24c;
    let word = |at: usize| -> Result<usize> {
        let bytes = bzimage.get(at..at + 4).context("The file is truncated")?;
        Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    ensure!(bzimage.get(MAGIC..MAGIC + 4) == Some(b"HdrS"), "The file is not a bzImage");
    let start = (usize::from(bzimage[SETUP_SECTORS]) + 1) * 512 + word(PAYLOAD_OFFSET)?;
    let bytes =
        word(PAYLOAD_BYTES)?.checked_sub(4).context("The payload has no size at its end")?;
    let elf_bytes = word(start + bytes)?;
    let payload = bzimage.get(start..start + bytes).context("The file is truncated")?;
    let elf = match payload {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => zstd::bulk::decompress(payload, elf_bytes)?,
        [0x02, 0x21, 0x4c, 0x18, blocks @ ..] => unpack_lz4(blocks, elf_bytes)?,
        _ => bail!("The payload begins with {:02x?}", &payload[..payload.len().min(4)]),
    };
    ensure!(
        elf.len() == elf_bytes && elf.starts_with(b"\x7fELF"),
        "The payload is not an ELF file"
    );
    Ok(elf)
}

/// Unpacks the blocks of lz4's legacy frame. A block's length precedes it. Each block except the
/// last one has an unpacked size of 8 MiB.
fn unpack_lz4(mut blocks: &[u8], elf_bytes: usize) -> Result<Vec<u8>> {
    const BLOCK_BYTES: usize = 8 << 20;
    let mut elf = Vec::with_capacity(elf_bytes);
    while let Some((len, rest)) = blocks.split_first_chunk::<4>() {
        let len = u32::from_le_bytes(*len) as usize;
        let block = rest.get(..len).context("A block is truncated")?;
        elf.extend(lz4_flex::block::decompress(block, BLOCK_BYTES)?);
        blocks = &rest[len..];
    }
    Ok(elf)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn bzimage(payload: &[u8], elf_bytes: usize) -> Vec<u8> {
        let mut image = vec![0; 2 * 512];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32 + 4).to_le_bytes());
        image.extend(payload);
        image.extend((elf_bytes as u32).to_le_bytes());
        image.extend(b"more code");
        image
    }

    #[test]
    fn payloads_of_both_kernels_are_unpacked() {
        let elf = [b"\x7fELF", &[7; 100_000][..]].concat();
        let block = lz4_flex::block::compress(&elf);
        let lz4 =
            [&[0x02, 0x21, 0x4c, 0x18][..], &(block.len() as u32).to_le_bytes(), &block].concat();
        for payload in [zstd::bulk::compress(&elf, 1).unwrap(), lz4] {
            assert!(unpack(&bzimage(&payload, elf.len())).unwrap() == elf);
            assert!(unpack(&bzimage(&payload, elf.len() + 1)).is_err(), "a wrong size");
            let image = bzimage(&payload, elf.len());
            assert!(unpack(&image[..1024 + payload.len() / 2]).is_err(), "a truncated file");
        }
        let error = unpack(&bzimage(b"BZh91AY", 1)).unwrap_err().to_string();
        assert!(error.contains("begins with [42, 5a, 68, 39]"), "{error}");
        assert!(unpack(&elf).is_err());
    }
    #[test]
    fn kernel_is_unpacked_once_for_concurrent_threads() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path();
        let image = folder.join("vmlinuz");
        let elf = [b"\x7fELF", &[7; 4_000_000][..]].concat();
        let payload = zstd::bulk::compress(&elf, 1).unwrap();
        fs::write(&image, bzimage(&payload, elf.len())).unwrap();
        let cache = folder.join("unpacked");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let path = unpacked_in(&cache, &image).unwrap();
                    assert!(fs::read(path).unwrap() == elf);
                });
            }
        });
    }

    #[test]
    fn payload_without_a_size_is_refused() {
        for payload_bytes in 0..4u32 {
            let mut image = bzimage(b"", 0);
            image[0x24c..0x250].copy_from_slice(&payload_bytes.to_le_bytes());
            let error = unpack(&image).unwrap_err().to_string();
            assert!(error.contains("no size at its end"), "{payload_bytes} bytes: {error}");
        }
    }

    #[test]
    fn new_bzimage_of_the_same_name_is_unpacked_again() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path();
        let path = folder.join("vmlinuz");
        let time = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let elf = |byte: u8| [b"\x7fELF", &[byte; 1000][..]].concat();
        // The second image differs in its modification time, and the third one in its length.
        for (byte, code, seconds) in [(1, "", 1), (2, "", 2), (3, "more", 2)] {
            let payload = zstd::bulk::compress(&elf(byte), 1).unwrap();
            fs::write(&path, [bzimage(&payload, 1004), code.into()].concat()).unwrap();
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(time(seconds)).unwrap();
            let unpacked = unpacked_in(folder, &path).unwrap();
            assert!(fs::read(&unpacked).unwrap() == elf(byte), "image {byte}");
            assert_eq!(unpacked_in(folder, &path).unwrap(), unpacked);
        }
    }
}
