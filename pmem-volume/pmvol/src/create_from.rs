//! Creation of a volume from an image.
//!
//! The volume has a temporary name until the image is complete and durable. Therefore, a crash
//! never leaves an incomplete volume under the requested name.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use pmem_volume::btt::volume_bytes_for;
use pmem_volume::pool::layout::MAX_NAME_BYTES;
use pmem_volume::{
    CHUNK_BYTES, OpenMode, Pool, PoolError, VolumeFormat, VolumeInfo, VolumeOptions, VolumeSize,
};

use super::btt::{ImportSizes, Location, Media, Source, fill};
use super::commands::{add_flag_context, scrub_for};
use super::meter::with_meter;

/// Suffix of the volume's name during the import.
const SUFFIX: &str = ".importing";

/// A volume to create.
pub(crate) struct NewVolume<'a> {
    pub(crate) name: &'a str,
    /// Size of the volume. `None` means the smallest size that holds the image.
    pub(crate) size: Option<VolumeSize>,
    pub(crate) format: VolumeFormat,
    pub(crate) thin: bool,
    pub(crate) reserve_bytes: Option<u64>,
}

impl NewVolume<'_> {
    fn size_for(&self, source: &Source<'_>) -> anyhow::Result<VolumeSize> {
        if let Some(size) = self.size {
            return Ok(size);
        }
        let image_bytes = source.len_bytes().expect("the command line of a stream has a size");
        let bytes = match self.format {
            VolumeFormat::Btt => volume_bytes_for(image_bytes),
            VolumeFormat::Raw => image_bytes.max(1).checked_next_multiple_of(CHUNK_BYTES),
        };
        bytes.map(VolumeSize::Bytes).with_context(|| {
            format!("--from: the image has {image_bytes} bytes, and no volume can be that large")
        })
    }

    /// Returns the volume's name during the import. A long name is truncated.
    fn temporary_name(&self) -> String {
        let end = self.name.floor_char_boundary(MAX_NAME_BYTES - SUFFIX.len());
        format!("{}{SUFFIX}", &self.name[..end])
    }
}

/// Creates a volume and fills it. A failed import deletes the volume.
pub(crate) fn create(
    path: &Path,
    new: &NewVolume<'_>,
    source: Source<'_>,
) -> anyhow::Result<(Arc<Pool>, VolumeInfo, ImportSizes)> {
    let source = source.unpacked()?;
    let size = new.size_for(&source)?;
    let part = new.temporary_name();
    let pool = with_meter(|progress| {
        let pool = Pool::open(path, OpenMode::ReadWrite)?;
        check_names(&pool, new.name, &part)?;
        let options = VolumeOptions {
            size,
            format: new.format,
            thin: new.thin,
            reserve_bytes: new.reserve_bytes,
        };
        scrub_for(&pool, options, progress)?;
        pool.create_volume_with(&part, options)?;
        anyhow::Ok(pool)
    })
    .map_err(add_flag_context)?;
    match fill_temporary(&pool, &part, new.name, source) {
        Ok((volume, filled)) => Ok((pool, volume, filled)),
        Err(error) => {
            let deleted = with_meter(|progress| {
                pool.delete_volume(&part)?;
                pool.scrub_all_with(progress)
            });
            Err(match deleted {
                Ok(()) => error.context("no volume was created"),
                Err(_) => error.context(leftover_error(&pool, &part)),
            })
        }
    }
}

fn check_names(pool: &Pool, name: &str, part: &str) -> anyhow::Result<()> {
    for volume in pool.volumes() {
        if volume.name == name {
            return Err(PoolError::VolumeExists { name: name.to_owned() }.into());
        }
        if volume.name == part {
            bail!("{}", leftover_error(pool, part));
        }
    }
    Ok(())
}

fn leftover_error(pool: &Pool, part: &str) -> String {
    format!(
        "volume {part:?} is left of an import that did not end; `pmvol volume delete {} {part} --force` removes it",
        pool.path().display()
    )
}

fn fill_temporary(
    pool: &Arc<Pool>,
    part: &str,
    name: &str,
    source: Source<'_>,
) -> anyhow::Result<(VolumeInfo, ImportSizes)> {
    let media = Media::Volume(pool.open_volume(part)?);
    let filled = fill(&media, &Location::volume(pool.path(), name), source)?;
    drop(media);
    Ok((pool.rename_volume(part, name)?, filled))
}

#[cfg(test)]
mod tests {
    use pmem_volume::pool::VolumeName;

    use super::*;

    #[test]
    fn name_during_import_is_valid() {
        for name in ["data", &"x".repeat(MAX_NAME_BYTES), &"ü".repeat(MAX_NAME_BYTES / 2)] {
            let (format, reserve_bytes) = (VolumeFormat::Btt, None);
            let new = NewVolume { name, size: None, format, thin: false, reserve_bytes };
            let part = new.temporary_name();
            assert!(part.parse::<VolumeName>().is_ok() && part != name, "{part}");
        }
    }
}
