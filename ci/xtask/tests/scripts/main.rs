//! The wrappers of the tasks, with copies of the files that they read in a directory of their own.

mod bench_task;
mod demo_task;
mod images;
mod signals;
mod soak_task;
mod test_task;
mod tree;
