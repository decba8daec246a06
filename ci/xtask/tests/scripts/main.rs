//! Tests of the wrapper scripts. Each test copies the scripts and the files that they read to its
//! own directory.

mod images;
mod signals;
mod tasks;
mod test_task;
mod tree;
