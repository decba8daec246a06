//! Image formats of plots, and the file that a plot is written to.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use plotters::prelude::{BitMapBackend, IntoDrawingArea, SVGBackend};
use plotters::style::{FontStyle, register_font};

use super::plot::{self, Plot};

/// First bytes of every SVG plot that this program writes.
const SVG_MARK: &str = "<!-- foreshore-sim -->\n";
/// First bytes of every PNG file.
const PNG_SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";
/// Text chunk of every PNG plot that this program writes. The PNG specification defines the
/// keyword.
const PNG_TEXT: [&str; 2] = ["Software", "foreshore-sim"];
/// Number of bytes at the start of a file by which a plot is recognized. In a PNG file, the text
/// chunk follows the header chunk.
const HEAD_BYTES: u64 = 128;

/// Noto Sans, reduced to Latin letters (fonts/README.md). A static program cannot use the system's
/// fonts.
const FONT: &[u8] = include_bytes!("../fonts/NotoSans-Latin.ttf");

/// File to which `--plot` writes a plot.
#[derive(Clone, Debug)]
pub(crate) struct PlotFile {
    path: PathBuf,
    format: ImageFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImageFormat {
    Svg,
    Png,
}

impl TryFrom<PathBuf> for PlotFile {
    type Error = String;

    /// Chooses the format by the file's extension. SVG is used for a path without an extension,
    /// such as a pipe.
    fn try_from(path: PathBuf) -> Result<Self, String> {
        let extension = path.extension().map(OsStr::to_ascii_lowercase);
        let format = match extension.as_ref().and_then(|extension| extension.to_str()) {
            Some("png") => ImageFormat::Png,
            Some("svg") => ImageFormat::Svg,
            None if extension.is_none() => ImageFormat::Svg,
            _ => return Err(format!("{} must end in .svg or .png", path.display())),
        };
        Ok(PlotFile { path, format })
    }
}

impl PlotFile {
    /// Draws the plot and writes it to the file. An existing file is replaced only if it is empty
    /// or a plot.
    pub(crate) fn write(&self, plot: &Plot) -> anyhow::Result<()> {
        let image = match self.format {
            ImageFormat::Svg => svg(plot)?.into_bytes(),
            ImageFormat::Png => png(plot)?,
        };
        self.replace(&image).with_context(|| format!("cannot write {}", self.path.display()))
    }

    fn replace(&self, image: &[u8]) -> anyhow::Result<()> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(&self.path)?;
        if file.metadata()?.is_file() {
            let mut head = Vec::new();
            Read::by_ref(&mut file).take(HEAD_BYTES).read_to_end(&mut head)?;
            if !head.is_empty() && !is_plot(&head) {
                bail!("the file exists and is not a plot of foreshore-sim");
            }
            file.set_len(0)?;
            file.rewind()?;
        }
        file.write_all(image)?;
        Ok(())
    }
}

/// Returns true if a file that starts with `head` is a plot in either format.
fn is_plot(head: &[u8]) -> bool {
    let text = format!("tEXt{}", PNG_TEXT.join("\0"));
    head.starts_with(SVG_MARK.as_bytes())
        || head.starts_with(PNG_SIGNATURE)
            && head.windows(text.len()).any(|bytes| bytes == text.as_bytes())
}

pub(super) fn svg(plot: &Plot) -> anyhow::Result<String> {
    register()?;
    let mut image = SVG_MARK.to_owned();
    let backend = SVGBackend::with_string(&mut image, plot.size());
    plot::draw(&backend.into_drawing_area(), plot).context("cannot draw the plot")?;
    Ok(image)
}

fn png(plot: &Plot) -> anyhow::Result<Vec<u8>> {
    register()?;
    let (width, height) = plot.size();
    let mut pixels = vec![0; width as usize * height as usize * 3];
    let backend = BitMapBackend::with_buffer(&mut pixels, plot.size());
    plot::draw(&backend.into_drawing_area(), plot).context("cannot draw the plot")?;
    let mut image = Vec::new();
    let mut encoder = png::Encoder::new(&mut image, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.add_text_chunk(PNG_TEXT[0].to_owned(), PNG_TEXT[1].to_owned())?;
    encoder.write_header()?.write_image_data(&pixels)?;
    Ok(image)
}

/// Registers the font with plotters. An SVG image contains only the name of the font family, but
/// its layout depends on the size of its texts.
fn register() -> anyhow::Result<()> {
    let is_valid = register_font(plot::FONT_FAMILY, FontStyle::Normal, FONT).is_ok();
    ensure!(is_valid, "the font of plots is damaged");
    Ok(())
}
